"""Makes the suite run from a checkout without installation.

pyproject.toml blocks the entry point of an installed copy, so the options are registered once, by this checkout.
"""

pytest_plugins = ["equivtests.plugin"]
