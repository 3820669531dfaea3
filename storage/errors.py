"""The errors of `storage`: one root, a subclass only where a caller acts differently."""


class StorageError(Exception):
    """Something durable could not be read, written or trusted."""


class ObjectMissing(StorageError):
    """No object under this key: the caller may create it, or treat it as not yet there."""


class StoreUnavailable(StorageError):
    """The store did not answer cleanly: the operation may or may not have happened."""


class StoreRefused(StoreUnavailable):
    """The store answered, and asking again cannot help: no such bucket, no permission, credentials it does not know."""


class StoreUnsound(StorageError):
    """The store does not honour create-if-absent, so no run may be kept there."""


class IntegrityError(StorageError):
    """Bytes, hashes or schema are not what was promised."""


class SnapshotDamaged(IntegrityError):
    """An object of a data snapshot is not what its manifest says: it can be made anew from its source."""


class NothingReadable(IntegrityError):
    """A run has committed checkpoints and none can be resumed from: a person says whether it begins again."""


class Fenced(StorageError):
    """A newer attempt owns the run, or the own attempt has been ended: stop and acknowledge nothing."""


class AppendUnknown(StorageError):
    """An append could not be settled: stop, acknowledge nothing, read the log again later."""
