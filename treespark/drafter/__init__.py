# SPDX-License-Identifier: Apache-2.0
"""Drafters: configuration, block backbone, heads, context cache, checkpoints."""
