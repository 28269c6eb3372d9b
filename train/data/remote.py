"""Data at a URL, such as gs://bucket/text.txt: copied into the user's cache folder once for each version.

fsspec reads every URL whose client is installed, such as gcsfs for gs://. Credentials come from the environment and
from the configuration files of the clouds.
"""

import hashlib
import json
import tempfile
from pathlib import Path

from train.lifecycle.errors import InputError, StorageError
from train.lifecycle.files import user_cache


def fetch(location: str, field: str) -> Path:
    """Copies a file or a folder of data into the user's cache folder, unless the same version is there already.

    Returns the local file or folder, whose name is that of the original. `field` is the field of the configuration that
    names the URL, for the messages.
    """
    try:
        return _fetch(location)
    except (FileNotFoundError, PermissionError, ImportError, ValueError) as error:
        raise InputError(f"{field}={location} cannot be read: {type(error).__name__}: {error}") from error
    except Exception as error:  # each client has errors of its own, such as gcsfs.retry.HttpError
        raise StorageError(f"{field}={location} did not answer: {type(error).__name__}: {error}") from error


def _fetch(location: str) -> Path:
    import fsspec  # imported late, because most runs do not need it

    store, root = fsspec.core.url_to_fs(location, use_listings_cache=False, skip_instance_cache=True)
    root = root.rstrip("/")
    found = {root: store.info(root)} if store.isfile(root) else store.find(root, detail=True)
    if not found:
        raise FileNotFoundError(f"there is no {location}")
    # What a store says about its objects, such as their size, their time and their ETag, tells versions apart.
    version = hashlib.blake2b(json.dumps(found, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    folder, name = user_cache() / "data" / version, root.rpartition("/")[2]
    if folder.exists():
        return folder / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".tmp") as temporary:
        for path in found:
            if not path.endswith("/"):  # some tools mark folders with such objects
                copy = Path(temporary, "data", name + path.removeprefix(root))
                copy.parent.mkdir(parents=True, exist_ok=True)
                store.get_file(path, str(copy))
        try:
            Path(temporary, "data").rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
    return folder / name
