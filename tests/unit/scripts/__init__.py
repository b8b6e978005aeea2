"""Tests of the scripts that hold more than calls."""
