"""Tests of the `treadle` command."""
