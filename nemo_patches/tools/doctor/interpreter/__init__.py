"""One abstract interpreter of Python: which collectives each rank of a file's functions makes.

values.py says what is known of an expression, members.py what the rank number makes of it, and
knowledge.py what is known by name. plain_python.py makes Python plainer, source_file.py and
interpreter.py read it, calls.py and collectives.py say what a call gives and whether it is a
collective. skeleton.py is what is left of a function, way.py follows it, divergences.py compares
two ways, and sentences.py says what was found.
"""
