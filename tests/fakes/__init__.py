"""Working stand-ins for the neighbours of the part under test."""
