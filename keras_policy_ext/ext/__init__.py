"""Extensions: what a step, `convert`, `freeze` and a file do not need.

Each folder is one extension.
"""
