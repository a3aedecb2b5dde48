"""What readers of columnar files share: which columns are lists, and which files in a folder are data."""

from __future__ import annotations

import pyarrow as pa


def is_list(kind: pa.DataType) -> bool:
    """Lists of any of Arrow's layouts."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    )  # fmt: skip


def hidden(name: str) -> bool:
    """A path beneath a folder of which a part begins with a dot or an underscore, as writers name what is no
    data."""
    return any(part.startswith((".", "_")) for part in name.split("/"))
