"""Writes the generated pages of docs/: `python -m tests.docs_gen docs`.

`pages` lists the pages. Each has a module with the text around its tables; the described objects
have the descriptions.
"""
