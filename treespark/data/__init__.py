# SPDX-License-Identifier: Apache-2.0
"""Training data: prompts, the target's continuations, features and batches."""
