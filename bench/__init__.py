"""Loading KDA layers, against the other ways to do it and against what the machine can do.

`python -m bench --help`, from the root of the repository.
"""
