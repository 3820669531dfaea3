"""Which permissions this process and its children leave to others on what they write.

Owns one rule: never is anything writable for everybody, whatever the umask allows; everything else is the umask's. A
store, a cache or a spool that anybody may write to is one in which anybody may change what is trained.
"""

import os
import stat


def forbid_writing_by_everybody() -> None:
    """Take the right of others to write out of everything that is made from now on; the rest of the umask stays."""
    os.umask(os.umask(0o777) | stat.S_IWOTH)
