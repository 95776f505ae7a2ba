"""`BackendSuite`: a backend's model gives each row what it would get alone, and its slots keep what they hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar

import torch

from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.errors import StartError
from rwkv_lightning.core.interfaces import Backend, Batch, LoadOptions, Model, SlotStates
from rwkv_lightning.core.testing.suite import Suite, check, check_raises

LENGTHS = (1, 17, 5, 64, 2, 33, 1)  # of the rows' prompts: around the block sizes that kernels like


class BackendSuite(Suite, ABC):
    """Subclass it, and return the backend from `backend`.

    Attributes:
        model_file: a model that the backend can load.
        options: how to load it.
        tolerance: largest relative distance |a - b| / |b| between a row's logits computed in two ways; 0 asks for the
            same bits, as `--deterministic` promises.
        reads_files: False when the backend makes its model without a file.
        seed: of the prompts.
    """

    model_file: ClassVar[Path] = demo_model_path()
    options: ClassVar[LoadOptions] = LoadOptions(deterministic=True)
    tolerance: ClassVar[float] = 0.0
    reads_files: ClassVar[bool] = True
    seed: ClassVar[int] = 1

    @abstractmethod
    def backend(self) -> Backend:
        """The backend under test."""

    # Helpers, for further tests of your own too

    def model(self) -> Model:
        """The model, loaded once for all tests of the class."""
        return _load(type(self))

    def states(self, count: int) -> SlotStates:
        """Fresh slots, all in the zero state."""
        states = self.model().new_states(count)
        states.reset(range(count))
        return states

    def prompts(self) -> list[list[int]]:
        """Rows of token ids, of mixed lengths."""
        generator = torch.Generator().manual_seed(self.seed)
        size = self.model().config.vocab_size
        return [torch.randint(1, size, (length,), generator=generator).tolist() for length in LENGTHS]

    def feed(
        self, states: SlotStates, rows: Sequence[tuple[int, Sequence[int]]], positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Feed (slot, tokens) rows in one step; logits [S, V], after each row's last token unless told otherwise."""
        model = self.model()
        offsets = torch.tensor([0, *(len(tokens) for _, tokens in rows)]).cumsum(0)
        wanted = offsets[1:] - 1 if positions is None else torch.tensor(positions, dtype=torch.int64)
        batch = Batch(
            tokens=torch.tensor([token for _, tokens in rows for token in tokens], dtype=torch.int32),
            offsets=offsets.int(),
            slots=torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
            logit_positions=wanted,
        )
        return model.forward(batch, states).clone()

    def alone(self, prompt: Sequence[int]) -> torch.Tensor:
        """Logits [V] after a prompt that has the model for itself."""
        return self.feed(self.states(1), [(0, prompt)])[0]

    def same(self, logits: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Check two rows of logits for equality within the tolerance."""
        if torch.equal(logits, expected):
            return
        distance = float((logits - expected).norm() / expected.norm())
        check(distance <= self.tolerance, f"{what}: off by {distance:.2g}, more than {self.tolerance:g}")

    # The backend

    def test_probe_says_usable_or_why_not(self) -> None:
        backend = self.backend()
        reason = backend.probe(self.options.device)
        check(reason is None, f"the device of the tests is refused: {reason}")
        refusal = backend.probe("no-such-device")
        check(isinstance(refusal, str) and refusal.strip(), "an unknown device is not refused with a sentence")

    def test_missing_files_are_refused_as_start_errors(self) -> None:
        backend, missing = self.backend(), Path("there/is/no/such/model.pth")
        if self.reads_files:
            error = check_raises(lambda: backend.load(missing, self.options), StartError, "loading a missing file")
            check("model.pth" in str(error), "the error of a missing file does not name it")
        else:
            check(backend.load(missing, self.options), "a backend that reads no files needs none")

    def test_model_describes_itself(self) -> None:
        model = self.model()
        check(isinstance(model, Model), "the model lacks a member of interfaces.Model")
        check(model.config.vocab_size >= 1, "config.vocab_size is not positive")
        check(model.description and "\n" not in model.description, "description is not one line of text")
        states = model.new_states(3)
        check(isinstance(states, SlotStates), "the slots lack a member of interfaces.SlotStates")
        check(states.count == 3, "new_states(3) has another count")
        check(states.nbytes_per_slot == model.state_nbytes() > 0, "state_nbytes differs from nbytes_per_slot, or is 0")

    # Logits

    def test_logits_have_the_promised_form(self) -> None:
        size = self.model().config.vocab_size
        logits = self.feed(self.states(2), [(1, [1, 2]), (0, [3])])
        check(logits.dtype == torch.float32, f"logits are {logits.dtype}, not float32")
        check(logits.shape == (2, size), f"logits are {list(logits.shape)}, not [2, {size}]")
        check(not logits.isnan().any(), "logits hold NaN")
        none = self.feed(self.states(1), [(0, [1, 2])], [])
        check(none.shape == (0, size), f"logits of no position are {list(none.shape)}, not [0, {size}]")

    def test_ragged_batch_equals_rows_alone(self) -> None:
        prompts = self.prompts()
        together = self.feed(self.states(len(prompts)), list(enumerate(prompts)))
        for i, prompt in enumerate(prompts):
            self.same(together[i], self.alone(prompt), f"row {i} of a batch, {len(prompt)} tokens")

    def test_order_and_slots_do_not_matter(self) -> None:
        prompts = [prompt for prompt in self.prompts() if len(prompt) > 1]
        slots = [(i * 3 + 4) % 7 for i in range(len(prompts))]
        states = self.states(7)
        self.feed(states, [(slot, prompt[:-1]) for slot, prompt in zip(slots, prompts, strict=True)])
        turned = self.feed(states, [(slot, prompt[-1:]) for slot, prompt in zip(slots, prompts, strict=True)][::-1])
        for logits, prompt in zip(turned, prompts[::-1], strict=True):
            self.same(logits, self.alone(prompt), f"a row of {len(prompt)} tokens that changed its place in the batch")

    def test_chunk_boundaries_do_not_matter(self) -> None:
        prompt = max(self.prompts(), key=len)
        whole = self.alone(prompt)
        for size in (1, 3, 16, len(prompt) - 1):
            states = self.states(1)
            for start in range(0, len(prompt), size):
                logits = self.feed(states, [(0, prompt[start : start + size])])
            self.same(logits[0], whole, f"a prompt in chunks of {size}")

    def test_rows_decode_beside_prompts(self) -> None:
        prompts = self.prompts()[:4]
        states = self.states(len(prompts))
        for t in range(max(map(len, prompts))):  # each row a token at a time, long ones staying when short ones end
            rows = [(i, prompt[t : t + 1]) for i, prompt in enumerate(prompts) if t < len(prompt)]
            logits = self.feed(states, rows)
            for k, (i, _) in enumerate(rows):
                if t == len(prompts[i]) - 1:
                    self.same(logits[k], self.alone(prompts[i]), f"row {i}, fed a token at a time")

    def test_logits_are_given_where_asked_and_asking_changes_nothing(self) -> None:
        prompt, more = self.prompts()[1], [5, 6]
        asked, silent = self.states(1), self.states(1)
        inner = self.feed(asked, [(0, prompt)], [0, 12])
        self.feed(silent, [(0, prompt)], [])
        self.same(inner[0], self.alone(prompt[:1]), "logits after the first token of a chunk")
        self.same(inner[1], self.alone(prompt[:13]), "logits after the thirteenth token of a chunk")
        check(
            torch.equal(self.feed(asked, [(0, more)]), self.feed(silent, [(0, more)])),
            "the state depends on whether logits were wanted",
        )

    # Slots

    def test_a_reset_slot_is_a_new_one(self) -> None:
        _, _, prompt, other, *_ = self.prompts()
        states = self.states(2)
        self.feed(states, [(0, other), (1, other)])
        states.reset([1])
        self.same(self.feed(states, [(1, prompt)])[0], self.alone(prompt), "a prompt in a slot that was reset")
        self.same(self.feed(states, [(0, prompt)])[0], self.alone(other + prompt), "the slot beside it, not reset")

    def test_other_slots_are_left_alone(self) -> None:
        _, first, _, second, *_ = self.prompts()
        states = self.states(3)
        self.feed(states, [(1, first)])
        self.feed(states, [(0, second), (2, second)])
        self.same(self.feed(states, [(1, [7])])[0], self.alone([*first, 7]), "a slot that sat out a step")

    def test_copies_are_equal_and_independent(self) -> None:
        prompt = self.prompts()[1]
        states = self.states(4)
        self.feed(states, [(0, prompt), (2, [9])])
        states.copy([(0, 1), (0, 2)])
        copied = self.feed(states, [(1, [7]), (2, [8])])
        self.same(copied[0], self.alone([*prompt, 7]), "a copy")
        self.same(copied[1], self.alone([*prompt, 8]), "a copy over a used slot")
        self.same(self.feed(states, [(0, [8])])[0], self.alone([*prompt, 8]), "the source after its copies went on")

    def test_snapshots_come_back_bit_for_bit(self) -> None:
        prompt = self.prompts()[3]
        states, others = self.states(3), self.states(1)
        self.feed(states, [(1, prompt)])
        snapshot = states.export(1)
        continued = self.feed(states, [(1, [7])])
        states.reset([1])
        self.feed(states, [(0, prompt[:3]), (1, [4])])
        for pool, slot in ((states, 2), (states, 1), (others, 0)):  # once exported, restored as often as one likes
            pool.restore(slot, snapshot)
            check(torch.equal(self.feed(pool, [(slot, [7])]), continued), "a restored state gives other logits")
        self.same(self.feed(states, [(0, [7])])[0], self.alone([*prompt[:3], 7]), "the slot beside a restored one")

    def test_slots_that_do_not_exist_are_refused(self) -> None:
        states = self.states(2)
        self.feed(states, [(0, [5]), (1, [6])])
        snapshot = states.export(0)
        for slot in (2, -1):
            for what, call in {
                "reset": partial(states.reset, [slot]),
                "copy to": partial(states.copy, [(0, slot)]),
                "copy from": partial(states.copy, [(slot, 0)]),
                "export": partial(states.export, slot),
                "restore to": partial(states.restore, slot, snapshot),
            }.items():
                check_raises(call, Exception, f"{what} slot {slot} of 2")
        check_raises(lambda: states.restore(0, object()), Exception, "restore of something that is no snapshot")
        after = self.feed(states, [(0, [7]), (1, [7])])
        self.same(after[0], self.alone([5, 7]), "slot 0 after refused calls")
        self.same(after[1], self.alone([6, 7]), "slot 1 after refused calls")


@lru_cache(maxsize=1)  # the classes run one after the other, and a model may be large
def _load(suite: type[BackendSuite]) -> Model:
    return suite().backend().load(suite.model_file, suite.options)
