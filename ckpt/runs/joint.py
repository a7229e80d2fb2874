"""A run of several jobs: the checkpoints of its members count when all of them have saved the same step. No torch, and no server: the
members share nothing but storage.

    root/joint.json                           the generation: which restart its members have in common, and what they went on from
    root/trainer/step-00000020/               an ordinary checkpoint of one member
    root/step-00000020/members/GEN/trainer-ID empty: the member has committed that checkpoint in this generation
    root/step-00000020/checkpoint.json        the joint record. The step exists if and only if it does

Saving. Who has put its mark lists the marks; who sees those of all members puts the record, if the generation is still the present one.
The others look for the record, and rarely for the marks: whoever should have put it may have died. Who does not see the record by its
deadline puts one that gives the step up. Both puts are of an absent object, so exactly one happens.

Restoring. The first member that comes back begins a generation, by a compare-and-swap of joint.json. Then it gives up every step that has
marks and no record: whoever put the last mark of such a step either had put the record before, or sees the new generation, or finds the
step given up. Only then does it decide, and the others load what it decided. A member that finds its checkpoint damaged refuses the step,
and one below is decided for all. A restore ends when all members have loaded, and each has seen that: a member that died meanwhile has
not, so nobody goes on beside one that comes back later.
"""

from __future__ import annotations

import json
import logging
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from ckpt.errors import ConflictError, CorruptError, FormatError, NotFoundError, StorageError, UsageError
from ckpt.formats.native.commit import COMMIT_PATH, JOINT, CommitRecord, MemberCheckpoint, new_id, read_record
from ckpt.formats.native.virtual import GENERATION_LIMIT, GENERATION_PATH, MARKS
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.policies import KeepPolicy, retention
from ckpt.policies.keep import without_metric
from ckpt.text import parse_object

from .lineage import branches_after
from .members import Attendance, Generation, JointOutcome, Mark, MemberChanges, State, joint_steps, member_path, members_problem
from .removal import infos, remove_steps
from .step_listing import Step, check_release, directory_name, list_steps, step_name, step_url

log = logging.getLogger("ckpt")

REQUEST_PATH = "requested.json"
_SOON = 1.0
"""Seconds in which nobody can commit later steps and remove one for which a member has just put its mark."""
_FIRST_POLL, _LAST_POLL = 0.05, 1.0
"""Seconds between two looks at an object that somebody else will write: it grows from the first to the last."""
_QUIET = 10.0
"""Seconds after which a restore warns of members that have not started."""


class JointRun:
    """One member's end, on the rank that leads it. ``timeout``: seconds that it waits for the others."""

    def __init__(self, root: str, member: str, members: Sequence[str], timeout: float) -> None:
        self.root, self.member, self.members, self.timeout = root, member, tuple(members), timeout
        self._backend = open_backend(root)
        self._lock = threading.Lock()
        self._wanted: bytes | None = None
        """What ``requested.json`` says, as far as this process knows."""
        self.start_over()

    def start_over(self) -> None:
        """This process is about to restore: for the others it is a new one."""
        self.generation: Generation | None = None
        """The one that this process takes part in."""
        self._life = secrets.token_hex(8)
        self._joined: str | None = None
        """Id of the last generation that it has joined."""
        self._waiting: dict[int, Future[JointOutcome]] = {}
        self._begun = -1
        """The highest step of this generation that this member has begun to save."""
        self._newest = -1
        """The highest step of this generation that is known to be committed."""
        self._over: ConflictError | None = None
        """Another member has restarted: nothing that this process saves counts any more."""

    # ---- restoring

    def join(self, step: int | None = None, changes: MemberChanges | None = None) -> Generation:
        """Take part in the present restore, or begin one, and give it as soon as somebody has decided what to load. With ``step``, that
        one is decided, or another member has asked for the same."""
        end = time.monotonic() + self.timeout
        asked: Generation | None = None
        for _ in _polls(end):
            data, seen = self._read()
            before = None if seen is None else seen.joined.get(self.member)
            if seen is None or (before is not None and before.life != self._life):
                if self._joined is not None and seen is not None and seen.id >= self._joined:
                    raise ConflictError(f"another process restores as member {self.member}", where=self.root, hint="end one of the two")
                earlier = (seen.id,) if seen is not None else self._generations()
                begun = Generation(id=new_id(*earlier), members=self.members, joined=self._here("joined"))
                if self._swap(data, begun):
                    log.info("%s: %s begins generation %s", self.root, self.member, begun.id)
                    self._joined = begun.id
                continue
            asked = seen
            if before is not None:
                self._joined = seen.id
            if seen.members != self.members:  # in their order: the first leads
                if len(seen.joined) < len(seen.members):
                    continue  # those who began it may be gone, and begin another one
                self._swap(data, Generation(id=new_id(seen.id), members=self.members, joined=self._here("joined")))
            elif self.member not in seen.joined:
                self._swap(data, replace(seen, joined={**seen.joined, **self._here("joined")}))
            elif not seen.decided:
                self._swap(data, self._decide(seen, step, changes or MemberChanges()))
            else:
                if step is not None and seen.step != step:
                    raise UsageError(
                        f"this member asks for step {step}, and the others continue from {seen.step}",
                        where=self.root,
                        hint="give all members the same step, or none",
                    )
                self.generation = seen
                return seen
        others = ", ".join(asked.members) if asked is not None else "nobody"
        raise ConflictError(
            f"the members of this run do not agree within {self.timeout:g} s: here they are {', '.join(self.members)}, "
            f"in {GENERATION_PATH} {others}",
            where=self.root,
            hint="give every job the same Member(of=) in the same order, and start all of them",
        )

    def loaded(self) -> bool:
        """Say that this member has loaded what was decided, and wait until all have. False: something else is decided now."""
        generation = self.check_present()
        end = time.monotonic() + self.timeout
        warn_at = time.monotonic() + _QUIET
        seen: Generation | None = None
        for _ in _polls(end):
            data, seen = self._read()
            if seen is None or seen.id != generation.id or not seen.decided or seen.step != generation.step:
                return False
            absent = [name for name in self.members if name not in seen.joined]
            if absent and time.monotonic() >= warn_at:
                log.warning("%s: the restore waits for %s to start, for %g s in all", self.root, ", ".join(absent), self.timeout)
                warn_at = math.inf
            states = {name: a.state for name, a in seen.joined.items()}
            mine = states.get(self.member)
            if mine == "joined":
                self._swap(data, replace(seen, joined={**seen.joined, **self._here("loaded")}))
            elif len(states) == len(seen.members) and "joined" not in states.values():
                if mine == "loaded":
                    self._swap(data, replace(seen, joined={**seen.joined, **self._here("ready")}))
                elif set(states.values()) == {"ready"}:
                    return True
        there = seen.joined if seen is not None else {}
        absent = [name for name in self.members if name not in there]
        behind = [name for name, a in there.items() if a.state == "joined"]
        if not absent and not behind:
            behind = [name for name, a in there.items() if a.state != "ready"]
        what = "end the restore" if generation.step is None else f"load step {generation.step}"
        late = [f"{', '.join(names)} did not {do}" for names, do in ((absent, "begin to restore"), (behind, what)) if names]
        raise ConflictError(
            f"{' and '.join(late)} within {self.timeout:g} s",
            where=self.root,
            hint="start all members of the run; Job(timeout=) sets how long they wait for each other",
        )

    def refuse(self, reason: str) -> None:
        """Say that this member cannot load what was decided: a step below it is decided for all."""
        generation = self.check_present()
        for _ in _polls(time.monotonic() + self.timeout):
            data, seen = self._read()
            if seen is None or seen.id != generation.id or not seen.decided or seen.step != generation.step or seen.step is None:
                return
            record = self._record(seen.step)
            refused = {**seen.refused, **({record.id: f"{self.member}: {reason}"} if record is not None else {})}
            joined = {name: replace(a, state="joined") for name, a in seen.joined.items()}
            if self._swap(data, replace(seen, decided=False, step=None, checkpoints={}, refused=refused, joined=joined)):
                return

    def _decide(self, seen: Generation, step: int | None, changes: MemberChanges) -> Generation:
        """What the members of this generation go on from, by what the run has."""
        for s in self.steps():
            if s.prepared and not s.committed and s.number is not None:
                for old in self._backend.list_dir(f"{step_name(s.number)}/{MARKS}"):
                    if (id := old.rstrip("/")) < seen.id:
                        self._give_up(s.number, replace(seen, id=id), "the members restarted before all had saved it")
        there = self.steps()
        steps = [s for s in there if s.committed and s.members]
        failed: list[str] = []
        for s in sorted((s for s in there if s.abandoned is None or step is not None), key=lambda s: s.number or 0, reverse=True):
            if s.number is None or (step is not None and s.number != step):
                continue
            check_release([s])
            if s not in steps and not s.damaged:
                continue
            problem = s.reason or seen.refused.get(s.id or "") or members_problem(self._backend, s.members)
            if problem is not None:
                log.warning("%s is passed over: %s", s.url, problem)
                failed.append(f"{directory_name(s)}: {problem}")
                continue
            checkpoints = self._checkpoints(s, changes)
            log.info("%s: the members go on from step %d", self.root, s.number)
            left = tuple(other.number for other in steps if other.number is not None and other.number > s.number)
            branches = branches_after(s, there, complete=True)
            return replace(seen, decided=True, step=s.number, checkpoints=checkpoints, branches=branches, left=left)
        if failed:
            raise CorruptError(f"no joint step is whole: {'; '.join(failed)}", where=self.root, hint="`ckpt verify` shows more")
        if step is not None:
            raise NotFoundError(f"there is no joint step {step}", where=self.root, hint="`ckpt ls` lists the checkpoints there")
        return replace(seen, decided=True, step=None, checkpoints={})

    def _checkpoints(self, step: Step, changes: MemberChanges) -> dict[str, MemberCheckpoint]:
        """Of a step, by the names that the members have now."""
        there = dict(step.members)
        checkpoints = {name: there.pop(changes.renamed.get(name, name), None) for name in self.members}
        unknown = [name for name, checkpoint in checkpoints.items() if checkpoint is None and name not in changes.added]
        left = [name for name in there if name not in changes.dropped]
        if unknown or left:
            missing = f"has no {', '.join(unknown)}" if unknown else ""
            more = f"has {', '.join(left)} as well" if left else ""
            raise UsageError(
                f"step {step.number} {' and '.join(filter(None, (missing, more)))}",
                where=step.url,
                hint="say so: restore(state, members=MemberChanges(added=[…], dropped=[…], renamed={new: old}))",
            )
        return {name: checkpoint for name, checkpoint in checkpoints.items() if checkpoint is not None}

    def _here(self, state: State) -> dict[str, Attendance]:
        return {self.member: Attendance(life=self._life, state=state)}

    # ---- saving

    def check_present(self) -> Generation:
        """That this member takes part in the present generation."""
        if self.generation is None:
            raise UsageError(
                "a member restores before it saves: there the members agree on the step to continue from",
                where=self.root,
                hint="call restore(state) once, also in a run that has no step yet",
            )
        return self.generation

    def begin(self, n: int) -> None:
        """Step ``n`` is about to be saved, in place of one that an earlier generation has left behind: that is hidden first."""
        generation = self.check_present()
        if self._over is not None:
            raise self._over
        if n <= max(-1 if generation.step is None else generation.step, self._begun):
            what = "saved already" if n <= self._begun else "not after the one that the members of this run went on from"
            raise UsageError(f"step {n} is {what}", where=self.root, hint="the steps of a run of several jobs only rise")
        self._begun = n
        data = read_record(self._backend, f"{step_name(n)}/") if n in generation.left else None
        left = None if data is None else CommitRecord.from_bytes(data, step_url(self.root, n))
        if left is not None and (left.generation or "") > generation.id:
            raise self._restarted(self._read()[1])
        if left is not None and left.given_up is None and left.generation != generation.id:
            reason = f"generation {generation.id} saves this step again"
            gone = self._new_record(replace(generation, id=left.generation or ""), {}, n, reason)
            with suppress(ConflictError):  # another member was first
                self._backend.put_if(f"{step_name(n)}/{COMMIT_PATH}", gone.to_bytes(), expected=data)

    def failed(self) -> None:
        """The save that was begun last has failed, and the same step may be saved again."""
        with self._lock:
            self._begun = max(self._waiting, default=-1)

    def prepared(
        self, n: int, id: str, ranks: int, nbytes: int, ended: Callable[[JointOutcome | BaseException], object] = lambda end: None
    ) -> Future[JointOutcome]:
        """This member has committed its checkpoint ``id`` of step ``n``, of so many ranks and bytes of tensors. Gives what becomes of the
        joint step; does not wait for it. ``ended`` hears it before, or the error for which nobody knows."""
        generation, future = self.check_present(), Future[JointOutcome]()
        with self._lock:
            self._waiting[n] = future

        def finish() -> None:
            try:
                outcome = self._outcome(n, Mark(self.member, id, ranks, nbytes), generation)
                ended(outcome)
                future.set_result(outcome)
            except BaseException as err:  # noqa: BLE001  whoever asks for the result gets it
                ended(err)
                future.set_exception(err)

        threading.Thread(target=finish, name="ckpt-joint", daemon=True).start()
        return future

    def request(self, n: int) -> None:
        wanted = json.dumps({"generation": self.check_present().id, "step": n}).encode()
        for _ in range(3):
            try:
                self._backend.put_if(REQUEST_PATH, wanted, expected=self._wanted)
                self._wanted = wanted
                return
            except ConflictError:
                self._wanted, values = self._request()
                leading = values.get("generation")
                if isinstance(leading, str) and leading > self.check_present().id:
                    return  # it is another process that leads now

    def requested(self) -> int | None:
        """The step that the leading member of this generation asked for last."""
        values = self._request()[1]
        n = values.get("step")
        return n if values.get("generation") == self.check_present().id and isinstance(n, int) else None

    def _request(self) -> tuple[bytes | None, dict[str, Any]]:
        self._backend.evict(REQUEST_PATH)
        data: bytes | None = None
        try:
            data = self._backend.read_whole(REQUEST_PATH, GENERATION_LIMIT)
            return data, parse_object(data)
        except (NotFoundError, ValueError):
            return data, {}

    @property
    def waiting(self) -> tuple[int, ...]:
        """Steps of which this member does not know yet what becomes of them."""
        with self._lock:
            return tuple(sorted(n for n, future in self._waiting.items() if not future.done()))

    def wait(self, seconds: float) -> list[JointOutcome]:
        """What became of the steps that were prepared since the last call. An error of one is raised."""
        with self._lock:
            futures, self._waiting = list(self._waiting.values()), {}
        try:
            return [future.result(seconds) for future in futures]
        except FutureTimeoutError as err:
            raise StorageError(f"after {seconds:g} s it is not known whether the last step exists", where=self.root) from err

    def _outcome(self, n: int, mark: Mark, generation: Generation) -> JointOutcome:
        end, url = time.monotonic() + self.timeout, step_url(self.root, n)
        marks = f"{step_name(n)}/{MARKS}/{generation.id}"
        with suppress(ConflictError):  # it is there: a request was sent twice
            self._backend.put_if(f"{marks}/{mark}", b"", expected=None)
        for turn, _ in enumerate(_polls(end)):
            try:
                began = time.monotonic()
                there = self._marks(marks) if turn % 4 == 0 or self._newest > n else None
                record: CommitRecord | None = None
                if there and (turn or set(there) == set(generation.members)):
                    if (seen := self._read()[1]) is None or seen.id != generation.id:
                        raise self._restarted(seen)
                    if set(there) == set(generation.members):
                        made = self._new_record(generation, there, n)
                        record = self._put(n, made)
                        if record is made and (turn or time.monotonic() > began + _SOON) and not self._marks(marks):
                            gone = self._new_record(generation, {}, n, "it was removed when later steps had taken its place")
                            with suppress(ConflictError):
                                self._backend.put_if(f"{step_name(n)}/{COMMIT_PATH}", gone.to_bytes(), expected=made.to_bytes())
                            return JointOutcome(step=n, url=url)
                if turn and record is None:  # at first it was seen that it cannot be there yet
                    record = self._record(n)
                if record is not None and record.generation == generation.id:
                    self._newest = max(self._newest, n if record.given_up is None else -1)
                    return JointOutcome(step=n, url=url, given_up=record.given_up)
                if there is not None and not there:  # marks go with a step that was committed, when later ones take its place
                    return JointOutcome(step=n, url=url)
                if turn and there is not None and self._newest > n:  # who has saved that one saves this one no more
                    break
            except ConflictError:
                raise
            except StorageError as err:
                log.warning("%s: %s; it is asked again", url, err)
        if not (there := self._marks(marks)):
            return JointOutcome(step=n, url=url)
        awaited = [name for name in generation.members if name not in there]
        when = f"before step {self._newest}" if self._newest > n else f"within {self.timeout:g} s"
        record = self._give_up(n, generation, f"{', '.join(awaited) or 'a member'} did not save it {when}")
        if record.generation != generation.id:
            raise self._restarted(self._read()[1])
        return JointOutcome(step=n, url=url, given_up=record.given_up)

    def _give_up(self, n: int, generation: Generation, reason: str) -> CommitRecord:
        return self._put(n, self._new_record(generation, {}, n, reason))

    def _new_record(self, generation: Generation, marks: Mapping[str, Mark], n: int, given_up: str | None = None) -> CommitRecord:
        return CommitRecord(
            id=new_id(generation.id, *(mark.id for mark in marks.values())),
            world_size=sum(mark.ranks for mark in marks.values()),
            features=(JOINT,),
            index={},
            tensor_bytes=sum(mark.nbytes for mark in marks.values()),
            branches=generation.branches,
            members={
                name: MemberCheckpoint(member_path(name, n), mark.id)
                for name, mark in sorted(marks.items(), key=lambda m: generation.members.index(m[0]))
            },
            generation=generation.id,
            given_up=given_up,
        )

    def _put(self, n: int, record: CommitRecord) -> CommitRecord:
        """The record of step ``n``, unless there is one of the same generation or a later one: of those who try in one generation exactly
        one succeeds, and a process that stood still overwrites nothing. Gives the one that is there now."""
        data: bytes | None = None
        while True:
            try:
                self._backend.put_if(f"{step_name(n)}/{COMMIT_PATH}", record.to_bytes(), expected=data)
                return record
            except ConflictError:  # another member was first, or hid one of an earlier generation
                data = read_record(self._backend, f"{step_name(n)}/")
            there = None if data is None else CommitRecord.from_bytes(data, step_url(self.root, n))
            if there is not None and there.generation is None:
                hint = "move it to another run; a run of several jobs has a root of its own"
                raise ConflictError(
                    "a checkpoint of one job is here, which a joint step does not replace", where=step_url(self.root, n), hint=hint
                )
            if there is not None and (there.generation or "") >= (record.generation or ""):
                return there

    def _restarted(self, seen: Generation | None) -> ConflictError:
        """That this process takes part in no generation any more."""
        who = ", ".join(seen.joined) if seen is not None else "somebody"
        self._over = ConflictError(
            f"{who} restarted, and the members of this run restore again",
            where=self.root,
            hint="end this job and start it again, so that all continue from the same step",
        )
        return self._over

    # ---- removing

    def retain(self, keep: KeepPolicy) -> list[Step]:
        """Remove the joint steps that no rule keeps, with the checkpoints of their members, and what is left of steps that an
        earlier generation gave up. Gives the steps that went."""
        steps = self.steps()
        facts = infos(steps)
        verdicts = retention(keep, facts, datetime.now(timezone.utc))
        generation = self.check_present()
        newest = max(self._newest, -1 if generation.step is None else generation.step)  # what lies above may be saved again just now
        going = [s for s in steps if s.members and s.number in verdicts.removed]
        for rule in without_metric(keep, facts) if going else ():
            log.warning("steps are removed from %s, and %r keeps none: no step has this metric", self.root, rule)
        marks = f"{MARKS}/{generation.id}"  # with these a member may still ask what became of the step
        below = [s for s in steps if s.prepared and s.number is not None and s.number < newest]
        given_up = [s for s in below if not self._marks(f"{directory_name(s)}/{marks}")]
        if not (going or given_up) or not self._is_present():
            return []
        for s in given_up:  # before its marks: no record is read without them
            self._backend.delete(f"{directory_name(s)}/{COMMIT_PATH}")
        return remove_steps(self.root, [*going, *given_up], {})

    def sweep(self, given_up: Collection[str] | None = None) -> None:
        """Remove the checkpoints of this member that no joint step has: those with ids that were ``given_up``, or all, which is safe before
        anybody saves. Where a joint record is damaged, nothing goes: it may name any."""
        if given_up is not None and not given_up:
            return
        own = join_url(self.root, self.member)
        steps, joint = list_steps(own), self.steps()
        if any(s.damaged for s in joint) or not self._is_present():  # if it is, no later process has saved anything of what was listed
            return
        used = {checkpoint.id for s in joint for checkpoint in s.members.values()}
        used |= {checkpoint.id for checkpoint in self.check_present().checkpoints.values()}
        left = [s for s in steps if s.committed and s.number is not None and not s.tags and s.id not in used]
        left = [s for s in left if given_up is None or s.id in given_up]
        if left:
            users = {info.step: info.users for info in infos(steps)}
            remove_steps(own, sorted(left, key=lambda s: s.number or 0, reverse=True), users)

    # ---- objects

    def steps(self) -> list[Step]:
        return joint_steps(self._backend, self.root)

    def _record(self, n: int) -> CommitRecord | None:
        data = read_record(self._backend, f"{step_name(n)}/")
        return None if data is None else CommitRecord.from_bytes(data, step_url(self.root, n))

    def _marks(self, path: str) -> dict[str, Mark]:
        """By member; of several the one with the highest id."""
        return {mark.member: mark for mark in Mark.all_of(sorted(self._backend.list_dir(path)))}

    def _read(self) -> tuple[bytes | None, Generation | None]:
        self._backend.evict(GENERATION_PATH)
        try:
            data = self._backend.read_whole(GENERATION_PATH, GENERATION_LIMIT)
        except NotFoundError:
            return None, None
        return data, Generation.from_bytes(data, join_url(self.root, GENERATION_PATH))

    def _is_present(self) -> bool:
        """Whether no member has restarted."""
        seen = self._read()[1]
        return seen is not None and seen.id == self.check_present().id

    def check_not_restarted(self) -> None:
        """That no member has restarted: asked by who would replace a checkpoint, since it may be one of a later process."""
        if not self._is_present():
            raise self._restarted(self._read()[1])

    def _generations(self) -> set[str]:
        """Those that have left something in this run, of which ``joint.json`` may be gone. What begins has to sort after them. A damaged
        record counts for nothing here: it hides no other step."""
        ids: set[str | None] = set()
        for n in [s.number for s in self.steps() if s.number is not None]:
            ids |= {name.rstrip("/") for name in self._backend.list_dir(f"{step_name(n)}/{MARKS}")}
            with suppress(CorruptError, FormatError):
                record = self._record(n)
                ids |= {record.generation, record.id} if record is not None else set()
        return {id for id in ids if id}

    def _swap(self, before: bytes | None, after: Generation) -> bool:
        try:
            self._backend.put_if(GENERATION_PATH, after.to_bytes(), expected=before)
        except ConflictError:
            return False
        return True


def _polls(end: float) -> Iterator[None]:
    """Once at once, then again and again until ``end``, with pauses that grow and differ between processes."""
    pause = _FIRST_POLL
    while True:
        yield None
        if time.monotonic() >= end:
            return
        time.sleep(min(pause * random.uniform(0.5, 1.0), max(0.0, end - time.monotonic())))
        pause = min(pause * 1.5, _LAST_POLL)
