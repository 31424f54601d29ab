# SPDX-License-Identifier: Apache-2.0
"""The one exception type for mistakes a user can correct."""


class UsageError(ValueError):
    """A wrong option, file or combination; the message names it, its value and what is allowed.

    The command line prints the message on one line and exits with code 2.
    """
