"""Objects that are kept, in a folder or at a URL: files by name, chunks by content, sealed manifests.

A capability writes data as chunks (`chunks`), then a manifest that names them (`manifest`), and what nothing
names any more is swept away beside writers that are at work (`collect`); all of it through `files`, where a
write is seen whole or not at all. So a crash at any point leaves what was there before, and chunks that the
next writer finds and uses.
"""

from windtunnel.store.objects.files import Files, LocalFiles, ObjectError, OtherVersion, open_files, told

__all__ = ["Files", "LocalFiles", "ObjectError", "OtherVersion", "open_files", "told"]
