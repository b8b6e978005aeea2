"""Changes the metadata of a GGUF file, to make the files that a loader must refuse."""

from pathlib import Path
from typing import Any

import gguf


def edit_gguf_file(path: Path, **fields: Any) -> Path:
    """Rewrite a file with some keys set (``arch__key`` stands for ``arch.key``) or, where None, removed."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".edited"), "llama")
    changes = {key.replace("__", "."): value for key, value in fields.items()}
    kept = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    for key, field in kept.items():
        if key not in changes and key != "general.architecture":
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for key, value in changes.items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".edited")
