"""The numbers of the library this one replaces, wherever they were right."""

import math

import pytest
import torch
import unit_scaling.functional as U
from torch import Tensor

from .golden_values import GOLDEN
