# SPDX-License-Identifier: Apache-2.0
"""Training room: losses, replay of the deployed tree policy, the train flow and its checkpoints."""
