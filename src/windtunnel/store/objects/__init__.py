"""Objects that are kept, in a folder or at a URL: files by name, chunks by content, sealed manifests.

A capability writes its data (as `chunks`, where much of it is written again and again), then a manifest
that names them (`manifest`); all of it through `files`, where a write is seen whole or not at all. So a crash
at any point leaves what was there before.
"""

from windtunnel.store.objects.files import (
    Files,
    LocalFiles,
    ObjectError,
    OtherVersion,
    object_errors,
    open_files,
)

__all__ = ["Files", "LocalFiles", "ObjectError", "OtherVersion", "object_errors", "open_files"]
