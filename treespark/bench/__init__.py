# SPDX-License-Identifier: Apache-2.0
"""Measuring what serving does: definitions of the metrics and comparisons between decoders."""
