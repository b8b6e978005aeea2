"""Hypothesis state machines: any order of operations on a core, against a model that is too simple to be wrong."""
