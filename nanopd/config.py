"""What the user asked for: EngineConfig and SamplingParams.

Both are frozen and check themselves once, when they are made. Nothing inside the engine checks them again, so a value
out of range has to be caught here, with a sentence that says what was wrong and what is allowed.

This file knows nothing about models, tensors or requests, and imports none of the libraries that deal with them: the
command line is built from the fields below (their `help` metadata becomes `--help`), and it must start fast.
"""


class UserError(ValueError):
    """A mistake the user can mend. Its text is one sentence or two: what was wrong, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """
