"""Tests of the repository itself: the rules of services/STYLE.md that no other tool checks."""
