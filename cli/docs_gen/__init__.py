"""Pages of docs/ made from the code. A module gives the text of one; `__main__` writes them all."""
