"""Other decoders' interfaces, answered by the ops: each module here replaces functions of one released decoder.

A module imports nothing from its decoder. docs/use_it.md shows how to use each of them.
"""
