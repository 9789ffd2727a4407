"""One script per question; each prints rows and writes them to results/ with the machine and the
commit."""
