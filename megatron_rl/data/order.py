"""In which order rows are seen: shuffled per epoch by seed, files mixed by weight, position saved and restored."""

import numpy as np


class Ordered[T]:
    """Items of one or several files, taken in batches, epoch after epoch.

    Without weights an epoch sees every item once. With weights it has as many items as there are, file i giving
    weights[i] / sum(weights) of them: small files repeat, large files go on in the next epoch where this one stopped.
    The order depends on seed, sizes and weights alone.
    """

    def __init__(
        self,
        items: list[list[T]],
        seed: int,
        weights: tuple[float, ...] = (),
        shuffle: bool = True,
        drop_last: bool = False,
        summary: str = "",  # one line for the header: what was read, what was left out or cut
    ) -> None:
        self.summary = summary
        self._items = [item for file in items for item in file]
        self._sizes = [len(file) for file in items]
        self._counts = _counts(self._sizes, weights)
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self.epoch = 0  # from 0
        self.position = 0  # items of this epoch already taken
        self._order = self._epoch_order(0)

    def __len__(self) -> int:
        """Items of an epoch."""
        return len(self._items)

    @property
    def items(self) -> list[T]:
        """All items once, in file order."""
        return self._items

    def batches_per_epoch(self, n: int) -> int:
        return len(self) // n if self._drop_last else -(-len(self) // n)

    def next_batch(self, n: int) -> list[T]:
        """The next n items. At the end of an epoch the rest is one smaller list, or is left out with drop_last."""
        if self._drop_last and n > len(self):
            raise ValueError(
                f"the data has {len(self)} rows, a batch {n}, and --drop-last leaves none of them "
                "(give --no-drop-last or a smaller batch)"
            )
        remaining = len(self) - self.position
        if remaining < (n if self._drop_last else 1):
            self._go_to(self.epoch + 1, 0)
        taken = self._order[self.position : self.position + n]
        self.position += len(taken)
        return [self._items[i] for i in taken]

    def state(self) -> dict[str, int]:
        """Where the data stands; goes into the checkpoint."""
        return {"epoch": self.epoch, "position": self.position, "seed": self._seed, "rows": len(self)}

    def restore(self, state: dict[str, int]) -> None:
        """Goes on as if the run that gave `state` had not stopped. ValueError where seed or data are others."""
        for name, here, flag in (("seed", self._seed, "--seed"), ("rows", len(self), "--train-data")):
            if state[name] != here:
                raise ValueError(f"the checkpoint's data has {name} {state[name]}, this run's has {here} (see {flag})")
        self._go_to(state["epoch"], state["position"])

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._order = self._epoch_order(epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        pieces, start = [], 0
        for file, (size, count) in enumerate(zip(self._sizes, self._counts, strict=True)):
            pieces.append(start + self._stream(file, size, epoch * count, count))
            start += size
        order = np.concatenate(pieces)
        return (self._permute(order, -1, epoch) if self._shuffle else order).tolist()

    def _stream(self, file: int, size: int, begin: int, count: int) -> np.ndarray:
        """Items [begin, begin + count) of file's endless stream: permutation after permutation of its rows."""
        if count == 0:
            return np.zeros(0, dtype=np.int64)
        first, last = begin // size, (begin + count - 1) // size
        passes = [np.arange(size) for _ in range(first, last + 1)]
        if self._shuffle:
            passes = [self._permute(rows, file, first + i) for i, rows in enumerate(passes)]
        return np.concatenate(passes)[begin - first * size :][:count]

    def _permute(self, rows: np.ndarray, file: int, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self._seed, file + 1, epoch])).permutation(rows)


def _counts(sizes: list[int], weights: tuple[float, ...]) -> list[int]:
    """Items each file gives to an epoch; largest remainders get the rounded-off ones."""
    if not weights:
        return sizes
    if len(weights) != len(sizes):
        raise ValueError(f"{len(weights)} --data-weights for {len(sizes)} --train-data files")
    if not all(0 < w < float("inf") for w in weights):
        raise ValueError(f"--data-weights {weights}: each must be positive")
    exact = [sum(sizes) * w / sum(weights) for w in weights]
    counts = [int(e) for e in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: sum(sizes) - sum(counts)]:
        counts[i] += 1
    return counts
