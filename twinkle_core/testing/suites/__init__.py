"""The compliance suites, one module a contract. Import the classes from ``twinkle_core.testing``."""

import twinkle_core.testing.has_pytest  # noqa: F401  (says what to install, before a suite imports pytest)
