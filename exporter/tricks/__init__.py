"""LEAF: what makes exports and runs cheaper and changes nothing else; a module each. `docs/tricks.md` has the figures.

A module imports from a library when its trick is entered on a version that it is made for, and not before.
"""
