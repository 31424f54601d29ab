# SPDX-License-Identifier: Apache-2.0
"""Target models: loading, packed forwards, feature taps, slot KV cache, tree verification."""
