# SPDX-License-Identifier: Apache-2.0
"""The report of a suite run: numbers from its records, then tables, figures and one page."""
