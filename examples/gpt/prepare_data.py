"""Real text in Megatron's indexed format, one byte a token.

    python examples/gpt/prepare_data.py --output runs/data/text [--input FILE_OR_FOLDER ...]

Without --input it takes the sources of Python's standard library, which every machine has. Writes
PREFIX.bin and PREFIX.idx for --data-path; the tokenizer is Megatron's own byte-level one.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

END_OF_DOCUMENT, PADDING, VOCABULARY = 256, 257, 258
DOCUMENT = 1 << 13  # characters at most: even a single file can be split for validation


def tokenizer():
    """Megatron's byte-level tokenizer: 256 bytes, end of document, padding."""
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(
        metadata_path={'library': 'byte-level'},
        vocab_size=VOCABULARY,
        _eos_id=END_OF_DOCUMENT,
        _pad_id=PADDING,
    )


def text_files(inputs: list[Path]) -> Iterator[Path]:
    """Yield files among `inputs`, and .py, .txt and .md files below the folders among them."""
    for path in inputs:
        if path.is_dir():
            kept = (p for p in path.rglob('*') if p.suffix in ('.py', '.txt', '.md'))
            yield from sorted(p for p in kept if p.is_file() and 'site-packages' not in p.parts)
        else:
            yield path


def prepare(output: Path, inputs: list[Path] | None = None, max_bytes: int = 8_000_000) -> Path:
    """Write OUTPUT.bin and OUTPUT.idx; do nothing where both are there already.

    Args:
        output: prefix of the two files.
        inputs: files and folders; the standard library's sources where None.
        max_bytes: stop after the file that reaches it, so that preparing takes seconds.

    Returns:
        `output`, for --data-path.

    Raises:
        ValueError: an input does not exist, or there is no text in any.
    """
    from megatron.core.datasets.indexed_dataset import (
        DType,
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )

    inputs = inputs or [Path(sysconfig.get_path('stdlib'))]
    for path in inputs:
        if not path.exists():
            raise ValueError(f'--input {path} does not exist: name a file or a folder of text')
    bin_path, idx_path = Path(get_bin_path(str(output))), Path(get_idx_path(str(output)))
    if bin_path.exists() and idx_path.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    encode = tokenizer().tokenize
    # written under another name first: an interrupted run leaves nothing that looks whole
    partial = bin_path.with_suffix('.partial')
    builder = IndexedDatasetBuilder(str(partial), dtype=DType.optimal_dtype(VOCABULARY))
    total = 0
    with tqdm(total=max_bytes, unit='B', unit_scale=True, desc='prepare', disable=None) as bar:
        for path in text_files(inputs):
            text = path.read_text(encoding='utf-8', errors='replace')
            for start in range(0, len(text), DOCUMENT):
                tokens = encode(text[start : start + DOCUMENT])
                builder.add_document(torch.tensor([*tokens, END_OF_DOCUMENT]), [len(tokens) + 1])
                total += len(tokens)
                bar.update(len(tokens))
            if total >= max_bytes:
                break
    if not total:
        raise ValueError(f'no text in {", ".join(map(str, inputs))}: name files with text in them')
    builder.finalize(str(idx_path))
    os.replace(partial, bin_path)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--output', type=Path, default=Path('runs/data/text'), help='prefix')
    parser.add_argument('--input', type=Path, nargs='+', help='text files, or folders of them')
    parser.add_argument('--max-bytes', type=int, default=8_000_000, help='stop after so many')
    args = parser.parse_args()
    try:
        prepare(args.output, args.input, args.max_bytes)
    except ValueError as error:
        parser.error(str(error))
    print(f'{args.output}.bin and {args.output}.idx are ready for --data-path {args.output}')


if __name__ == '__main__':
    import megatron_zbpp

    megatron_zbpp.device()  # Megatron's datasets ask for CUDA where there is none
    main()
