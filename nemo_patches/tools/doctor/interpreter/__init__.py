"""One abstract interpreter of Python: which collectives each rank of a file's functions makes.

values.py says what is known of an expression, members.py what the rank number makes of it, and
knowledge.py what is known by name. plain_python.py makes Python plainer, and source_file.py has
what is known of a file. interpreter.py reads a function: statements.py, managers.py (with),
expressions.py and invocations.py (calls) say what each node does, functions.py what a helper of the
file does. calls.py says what any other call gives, and collectives.py whether it is a collective.
skeleton.py is what is left of a function, way.py follows it, divergences.py compares two ways, and
divergence_texts.py says what was found.
"""
