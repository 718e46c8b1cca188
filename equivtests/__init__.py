"""equivtests: is the update of N processes the update that one device would have made?"""

__version__ = "0.1.0"
