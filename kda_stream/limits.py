"""Every limit of the library, named, with its reason."""

from __future__ import annotations

from typing import Final

HEADER_BYTES_MAX: Final = 100_000_000
"""The longest header read: the safetensors package's own cap. `header_bytes_max` raises it."""

INDEX_BYTES_MAX: Final = 512 * 1024**2
"""The longest index read. 497,220 tensors (Kimi-K3) take about 60 MB."""

CONFIG_BYTES_MAX: Final = 16 * 1024**2
"""The longest config.json read; real ones stay under 100 kB."""

MANIFEST_BYTES_MAX: Final = 512 * 1024**2
"""The longest manifest read. 497,220 tensors take about 85 MB."""

INTEGER_MAX: Final = 2**64 - 1
"""The largest dimension, element count or offset: what the format's reference reader can hold."""

LAYER_DIGITS_MAX: Final = 100
"""The most digits of a layer's number: a longer one is no number, and Python will not read it."""

SLOT_ALIGNMENT_BYTES: Final = 256
"""Where that starts in a slot which does not lie as in its file: the alignment of CUDA allocations.

It holds for joined convolutions, for all that `copy=False` copies, for rows of a rank's part that
lie apart, for tensors from memory, and for one at an odd offset of its file. Where all others
start, `alignment=` says."""

LAYOUT_BYTES: Final = 4096
"""What a tensor's places in file and slot agree modulo: the page, and the block of every disk."""

READ_ALONG_BYTES_MAX: Final = 1024**2
"""How much of what belongs elsewhere is read along, for the sake of one long read in place."""

COPY_THREADS_MAX: Final = 4
"""How many threads copy out of the page cache: two fill a small machine's memory bus."""

READS_IN_FLIGHT: Final = 4
"""How many direct reads are in flight: one of 4 MiB reaches a disk's rate, and four never drain."""

BOUNCE_BYTES: Final = 4 * 1024**2
"""The scratch memory of a thread that reads blocks which cannot land in place: one read."""

DIRECT_BLOCK_BYTES_MIN: Final = 512
"""The smallest block of a disk."""

DIRECT_BLOCK_BYTES_MAX: Final = 65536
"""The largest block that is read directly: a file system that asks for more is read otherwise."""

READ_AHEAD_BYTES: Final = 32 * 1024**2
"""How far around a range the kernel may have read ahead: some times its largest usual window."""

DROP_SECONDS: Final = (0.0, 0.002, 0.008, 0.03)
"""When pages are dropped, and again where some were still being read ahead and could not be."""

FAULT_AROUND_BYTES: Final = 65536
"""How far around a touched page the kernel maps what is cached; fault_around_bytes of Linux."""

HUGE_PAGE_BYTES: Final = 2 * 1024**2
"""The border that an arena begins at, so that the kernel can give them huge pages."""

SLOTS_MAX: Final = 64
"""The most slots of one arena: more cannot help a stream, and a typo would lock all memory."""

WEIGHTS_SLOT_BYTES: Final = 64 * 1024**2
"""The slots that all weights pass through: room for most tensors; `slot_bytes` changes it."""

GAP_BYTES_MAX: Final = 65536
"""How much between two wanted tensors is read along: less than what a second read would cost."""

KEPT_SECONDS: Final = 5.0
"""How long a stream waits for tensors to be dropped that keep every slot, before it says so."""

COLLECT_SECONDS: Final = 0.1
"""How long it waits first for what will be dropped anyhow: a collection can take as long itself."""

READ_PIECE_BYTES: Final = 1024**2
"""How much of a header is read at once: a slow disk (20 MB/s) lets a signal be answered by then."""

CHECK_PIECE_BYTES: Final = 16 * 1024**2
"""How much payload is read and then looked at: long enough for the disk, short beside Ctrl-C."""

PAUSE_NANOSECONDS: Final = 50_000_000
"""How long the C routine copies before it comes back so that a signal or a stop is answered."""

BELL_SECONDS: Final = 0.2
"""How long a stream waits for its thread's ring before it looks for itself: Ctrl-C may eat one."""

ENDING_SECONDS: Final = 0.001
"""How long to wait before looking again whether a thread that has nothing left to do is over."""

ATTEMPTS_MAX: Final = 8
"""How often giving back is begun anew after signals: more than anyone presses Ctrl-C meanwhile."""

RANKS_SHOWN_MAX: Final = 1024
"""Up to which size an error lists the numbers of ranks that would do: nobody runs more."""

PROBLEMS_SHOWN_MAX: Final = 40
"""How many problems of a layer an error's line tells: more than a KDA block has tensors."""

SHOWN_CHARS_MAX: Final = 160
"""How much of a name from a file an error prints: names may be megabytes long."""

LINE_CHARS_MAX: Final = 4000
"""How much of any one value an error's line prints, lists included."""

SHOWN_ITEMS_MAX: Final = 12
"""How many items of a list an error's one line prints; the error's attributes hold all of them."""

SNIFF_BYTES: Final = 64
"""How much of a file's start is looked at to say what it is when it is no shard."""
