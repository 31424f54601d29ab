# SPDX-License-Identifier: Apache-2.0
"""Decoding for users: requests join and leave a fixed set of slots, one round at a time."""
