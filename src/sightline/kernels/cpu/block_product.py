"""Products of rows with quantised weights, as records.

Owns the packed weights and the memory of the quantised inputs. Does not know layers or files.
"""

from __future__ import annotations
