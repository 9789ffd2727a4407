"""Which cast each operand of a layer's three products gets, and where its scale comes from.
Imports `fp8.formats` and below.
"""
