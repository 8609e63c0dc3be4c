"""The context axis: the tokens of a sequence are cut over C ranks; only attention looks beyond its own tokens.

Read next: `split.py`, `blocks.py`, `models/placement.py`.
"""
