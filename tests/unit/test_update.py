"""The state machine of a weight update: every transition, and what holds of any course."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitroll.weights.update import (
    FLEET,
    Died,
    Done,
    Event,
    Failed,
    Failure,
    Outcome,
    Phase,
    Update,
)

Mode = Literal["rollback", "fence"]

NEXT = dict(zip(list(Phase)[:-1], list(Phase)[1:], strict=True))
OF_ENGINES = (
    Phase.PAUSE,
    Phase.LOAD,
    Phase.VERIFY,
    Phase.CLEAR,
    Phase.PUBLISH,
    Phase.RESUME,
)
CHANGING = (Phase.LOAD, Phase.VERIFY, Phase.CLEAR, Phase.PUBLISH)
MODES: tuple[Mode, Mode] = ("rollback", "fence")


def feed(update: Update, *events: Event) -> Update:
    for event in events:
        update = update.after(event)
    return update


def all_done(update: Update) -> Update:
    return feed(update, *(Done(who) for who in sorted(update.waiting)))


def at(phase: Phase, engines: str = "ab", on_failure: Mode = "rollback") -> Update:
    """An update in which everything went well until a phase."""
    update = Update.begin(engines, on_failure)
    while update.phase is not phase:
        update = all_done(update)
    return update.after(Done(FLEET)) if phase is Phase.LOAD else update  # the trainer has written


def restoring_at(phase: Phase, engines: str = "ab") -> Update:
    """An update that restores the old version, since the first engine failed to load."""
    first, *others = engines
    update = at(Phase.LOAD, engines).after(Failed(first, "no memory"))
    update = feed(update, *(Done(other) for other in others))
    assert update.restoring
    while update.phase is not phase:
        update = all_done(update)
    return update


def ended(update: Update) -> Update:
    while update.outcome is None:
        update = all_done(update)
    return update


def test_it_begins_with_the_gate_and_waits_for_the_fleet() -> None:
    update = Update.begin(["a", "b"], "rollback")
    assert (update.phase, update.waiting, update.outcome) == (Phase.GATE, {FLEET}, None)
    assert update.engines == {"a", "b"}


def test_its_phases_come_in_this_order_when_all_goes_well() -> None:
    update, phases = Update.begin("ab", "rollback"), []
    while update.outcome is None:
        phases.append(update.phase.value)
        update = all_done(update)
    told = "gate settle pause load verify clear publish resume"
    assert phases == told.split()
    assert (update.phase, update.outcome) == (Phase.END, Outcome.PUBLISHED)
    assert update.engines == {"a", "b"}
    assert (update.waiting, update.failures, update.lost, update.died) == (set(), (), set(), set())


@pytest.mark.parametrize("phase", [Phase.GATE, Phase.SETTLE])
def test_the_fleets_done_leads_on(phase: Phase) -> None:
    update = at(phase).after(Done(FLEET))
    assert update.phase is NEXT[phase]


@pytest.mark.parametrize("phase", [Phase.GATE, Phase.SETTLE])
@pytest.mark.parametrize("on_failure", MODES)
def test_a_failure_of_the_fleet_lets_all_resume_and_keeps_the_version(
    phase: Phase, on_failure: Mode
) -> None:
    update = at(phase, on_failure=on_failure).after(Failed(FLEET, "too slow"))
    assert (update.phase, update.waiting) == (Phase.RESUME, {"a", "b"})
    assert update.failures == (Failure(FLEET, phase, "too slow"),)
    assert not update.restoring
    update = ended(update)
    assert (update.outcome, update.engines, update.lost) == (Outcome.KEPT, {"a", "b"}, set())


def loading(on_failure: Mode = "rollback") -> Update:
    """An update whose trainer still writes."""
    return all_done(at(Phase.PAUSE, on_failure=on_failure))


def test_loading_waits_for_the_trainer_too() -> None:
    update = feed(loading(), Done("a"), Done("b"))
    assert (update.phase, update.waiting) == (Phase.LOAD, {FLEET})
    assert update.after(Done(FLEET)).phase is Phase.VERIFY


@pytest.mark.parametrize(
    ("on_failure", "outcome"), [("rollback", Outcome.KEPT), ("fence", Outcome.FENCED)]
)
def test_a_trainer_that_fails_while_it_writes_publishes_nothing(
    on_failure: Mode, outcome: Outcome
) -> None:
    """Nor does it when every engine dies of it."""
    update = feed(loading(on_failure), Failed(FLEET, "lost a rank"), Done("a"), Done("b"))
    assert ended(update).outcome is outcome
    update = feed(loading(on_failure), Died("a"), Died("b"), Failed(FLEET, "lost a rank"))
    assert ended(update).outcome is outcome


@pytest.mark.parametrize("phase", [Phase.GATE, Phase.SETTLE])
def test_an_engine_that_dies_in_a_phase_of_the_fleet_only_drops_out(phase: Phase) -> None:
    update = at(phase).after(Died("a"))
    assert (update.phase, update.waiting) == (phase, {FLEET})
    assert (update.engines, update.died) == ({"b"}, {"a"})
    update = ended(update)
    assert (update.outcome, update.engines, update.died) == (Outcome.PUBLISHED, {"b"}, {"a"})


@pytest.mark.parametrize("phase", [Phase.GATE, Phase.SETTLE])
@pytest.mark.parametrize("event", [Done("a"), Failed("a", "why")])
def test_an_engine_has_no_say_in_a_phase_of_the_fleet(phase: Phase, event: Event) -> None:
    assert at(phase).after(event) == at(phase)


@pytest.mark.parametrize("phase", OF_ENGINES)
@pytest.mark.parametrize("event", [Done(FLEET), Failed(FLEET, "why"), Died(FLEET)])
def test_the_fleet_has_no_say_in_a_phase_of_engines(phase: Phase, event: Event) -> None:
    assert at(phase).after(event) == at(phase)


@pytest.mark.parametrize("phase", OF_ENGINES)
def test_a_phase_is_left_only_when_every_engine_is_done(phase: Phase) -> None:
    update = at(phase, "abc")
    assert update.waiting == {"a", "b", "c"}
    update = feed(update, Done("b"), Done("a"))
    assert (update.phase, update.waiting, update.outcome) == (phase, {"c"}, None)
    assert update.after(Done("c")).phase is NEXT[phase]


@pytest.mark.parametrize("phase", OF_ENGINES)
@pytest.mark.parametrize("on_failure", MODES)
def test_a_failure_waits_for_the_other_engines(phase: Phase, on_failure: Mode) -> None:
    update = at(phase, on_failure=on_failure).after(Failed("a", "why"))
    assert (update.phase, update.waiting, update.outcome) == (phase, {"b"}, None)
    assert update.failures == (Failure("a", phase, "why"),)


@pytest.mark.parametrize("on_failure", MODES)
def test_a_failure_before_anything_changed_lets_all_resume(on_failure: Mode) -> None:
    update = feed(at(Phase.PAUSE, on_failure=on_failure), Failed("a", "why"), Done("b"))
    assert (update.phase, update.waiting) == (Phase.RESUME, {"a", "b"})
    assert (update.restoring, update.lost) == (False, set())
    assert ended(update).outcome is Outcome.KEPT


@pytest.mark.parametrize("phase", CHANGING)
def test_a_failure_after_something_changed_rolls_every_engine_back(phase: Phase) -> None:
    update = feed(at(phase, "abc"), Done("b"), Failed("a", "why"), Done("c"))
    assert (update.phase, update.waiting) == (Phase.LOAD, {"a", "b", "c"})
    assert update.restoring
    phases = []
    while update.outcome is None:
        phases.append(update.phase)
        update = all_done(update)
    assert phases == [*CHANGING, Phase.RESUME]
    assert (update.outcome, update.engines) == (Outcome.KEPT, {"a", "b", "c"})
    assert update.failures == (Failure("a", phase, "why"),)
    assert update.lost == set()


@pytest.mark.parametrize("phase", CHANGING)
def test_a_failure_after_something_changed_fences(phase: Phase) -> None:
    update = feed(at(phase, on_failure="fence"), Failed("a", "why"), Done("b"))
    assert (update.phase, update.outcome) == (Phase.END, Outcome.FENCED)
    assert (update.waiting, update.engines) == (set(), {"a", "b"})
    assert not update.restoring


@pytest.mark.parametrize("on_failure", MODES)
def test_an_engine_that_does_not_resume_is_lost_and_the_others_publish(on_failure: Mode) -> None:
    update = feed(at(Phase.RESUME, on_failure=on_failure), Failed("a", "why"), Done("b"))
    assert update.outcome is Outcome.PUBLISHED
    assert (update.engines, update.lost, update.died) == ({"b"}, {"a"}, set())


def test_an_engine_that_does_not_resume_after_a_failure_is_lost_too() -> None:
    update = at(Phase.SETTLE).after(Failed(FLEET, "too slow"))
    update = feed(update, Done("b"), Failed("a", "why"))
    assert update.outcome is Outcome.KEPT
    assert (update.engines, update.lost) == ({"b"}, {"a"})


def test_all_failures_are_told_in_their_order() -> None:
    update = feed(at(Phase.VERIFY), Failed("b", "first"), Failed("a", "second"))
    assert update.restoring
    update = feed(update, Failed("a", "third"), Done("b"))
    assert update.failures == (
        Failure("b", Phase.VERIFY, "first"),
        Failure("a", Phase.VERIFY, "second"),
        Failure("a", Phase.LOAD, "third"),
    )


@pytest.mark.parametrize("phase", OF_ENGINES)
@pytest.mark.parametrize("on_failure", MODES)
def test_an_engine_that_dies_drops_out_and_the_others_go_on(phase: Phase, on_failure: Mode) -> None:
    update = at(phase, "abc", on_failure).after(Died("a"))
    assert (update.phase, update.waiting) == (phase, {"b", "c"})
    assert (update.engines, update.died, update.failures) == ({"b", "c"}, {"a"}, ())
    update = ended(update)
    assert update.outcome is Outcome.PUBLISHED
    assert (update.engines, update.died, update.lost) == ({"b", "c"}, {"a"}, set())


@pytest.mark.parametrize("phase", OF_ENGINES)
def test_the_death_of_the_last_that_is_waited_for_leads_on(phase: Phase) -> None:
    update = feed(at(phase), Done("a"), Died("b"))
    assert update.phase is NEXT[phase]
    assert (update.engines, update.died) == ({"a"}, {"b"})


@pytest.mark.parametrize("phase", OF_ENGINES)
def test_an_engine_may_die_after_it_was_done(phase: Phase) -> None:
    update = feed(at(phase, "abc"), Done("a"), Died("a"))
    assert (update.phase, update.waiting) == (phase, {"b", "c"})
    assert (update.engines, update.died) == ({"b", "c"}, {"a"})


@pytest.mark.parametrize("phase", CHANGING)
def test_an_engine_that_failed_and_then_died_is_not_rolled_back(phase: Phase) -> None:
    update = feed(at(phase), Failed("a", "why"), Died("a"), Done("b"))
    assert (update.restoring, update.phase, update.waiting) == (True, Phase.LOAD, {"b"})
    assert ended(update).outcome is Outcome.KEPT


@pytest.mark.parametrize("phase", [*CHANGING, Phase.RESUME])
def test_an_engine_that_fails_while_restoring_is_lost(phase: Phase) -> None:
    update = restoring_at(phase, "abc").after(Failed("b", "again"))
    assert (update.phase, update.waiting) == (phase, {"a", "c"})
    assert (update.engines, update.lost, update.died) == ({"a", "c"}, {"b"}, set())
    assert update.failures[-1] == Failure("b", phase, "again")
    update = all_done(update)
    assert update.phase is NEXT[phase], "a failure while restoring does not restore again"
    update = ended(update)
    assert (update.outcome, update.engines, update.lost) == (Outcome.KEPT, {"a", "c"}, {"b"})


@pytest.mark.parametrize("phase", [*CHANGING, Phase.RESUME])
def test_an_engine_that_dies_while_restoring_drops_out(phase: Phase) -> None:
    update = ended(restoring_at(phase).after(Died("a")))
    assert update.outcome is Outcome.KEPT
    assert (update.engines, update.died, update.lost) == ({"b"}, {"a"}, set())


@pytest.mark.parametrize("phase", [*CHANGING, Phase.RESUME])
def test_a_restoration_in_which_all_are_lost_ends(phase: Phase) -> None:
    update = feed(restoring_at(phase), Failed("a", "again"), Failed("b", "again"))
    assert (update.phase, update.outcome) == (Phase.END, Outcome.KEPT)
    assert (update.engines, update.lost, update.waiting) == (set(), {"a", "b"}, set())


@pytest.mark.parametrize("phase", [Phase.PAUSE, *CHANGING])
@pytest.mark.parametrize("on_failure", MODES)
def test_a_version_that_no_engine_lived_to_publish_is_not_published(
    phase: Phase, on_failure: Mode
) -> None:
    update = feed(at(phase, on_failure=on_failure), Died("a"), Died("b"))
    assert (update.phase, update.outcome) == (Phase.END, Outcome.KEPT)
    assert (update.engines, update.died, update.waiting) == (set(), {"a", "b"}, set())
    assert [failure.who for failure in update.failures] == [FLEET], "the error tells why"


@pytest.mark.parametrize("phase", [Phase.GATE, Phase.SETTLE])
def test_the_death_of_all_in_a_phase_of_the_fleet_ends_it_with_the_fleets_answer(
    phase: Phase,
) -> None:
    update = feed(at(phase), Died("a"), Died("b"))
    assert (update.phase, update.waiting) == (phase, {FLEET})
    failed = update.after(Failed(FLEET, "too slow"))
    assert (failed.phase, failed.outcome) == (Phase.END, Outcome.KEPT)
    assert failed.failures == (Failure(FLEET, phase, "too slow"),)
    assert ended(update).outcome is Outcome.KEPT


def test_an_update_of_no_engine_publishes_nothing() -> None:
    assert ended(Update.begin((), "rollback")).outcome is Outcome.KEPT


def test_the_death_of_all_after_they_published_leaves_it_published() -> None:
    update = feed(at(Phase.RESUME), Died("a"), Died("b"))
    assert (update.outcome, update.died) == (Outcome.PUBLISHED, {"a", "b"})


@pytest.mark.parametrize("phase", CHANGING)
def test_the_death_of_all_others_after_a_failure_does_not_hinder_the_rollback(
    phase: Phase,
) -> None:
    update = feed(at(phase, "abc"), Failed("a", "why"), Died("b"), Died("c"))
    assert (update.phase, update.waiting, update.restoring) == (Phase.LOAD, {"a"}, True)
    assert feed(update, Died("a")).outcome is Outcome.KEPT


@pytest.mark.parametrize("phase", OF_ENGINES)
@pytest.mark.parametrize(
    "event",
    [
        Done("a"),
        Failed("a", "late"),
        Done("stranger"),
        Failed("stranger", "why"),
        Died("stranger"),
    ],
)
def test_late_and_foreign_events_change_nothing(phase: Phase, event: Event) -> None:
    update = at(phase).after(Done("a"))
    assert update.after(event) == update


@pytest.mark.parametrize("phase", OF_ENGINES)
@pytest.mark.parametrize("event", [Done("a"), Failed("a", "late"), Died("a")])
def test_the_dead_change_nothing(phase: Phase, event: Event) -> None:
    update = at(phase).after(Died("a"))
    assert update.after(event) == update


@pytest.mark.parametrize("event", [Done("a"), Failed("a", "late"), Died("a")])
def test_the_lost_change_nothing(event: Event) -> None:
    update = restoring_at(Phase.LOAD).after(Failed("a", "again"))
    assert update.after(event) == update


@pytest.mark.parametrize(
    "update",
    [
        ended(Update.begin("ab", "rollback")),
        ended(at(Phase.PAUSE).after(Failed("a", "why"))),
        ended(restoring_at(Phase.LOAD)),
        ended(at(Phase.LOAD, on_failure="fence").after(Failed("a", "why"))),
    ],
    ids=["published", "kept", "restored", "fenced"],
)
@pytest.mark.parametrize(
    "event", [Done(FLEET), Done("a"), Failed("a", "late"), Failed(FLEET, "late"), Died("a")]
)
def test_nothing_changes_an_update_that_ended(update: Update, event: Event) -> None:
    assert update.after(event) == update


@dataclass
class Course:
    """An update, and what every engine did in it, as an observer would note it down."""

    update: Update
    phases: list[tuple[Phase, bool]] = field(default_factory=list)
    done: set[tuple[str, Phase, bool]] = field(default_factory=set)
    asked: set[tuple[str, Phase, bool]] = field(default_factory=set)
    failed_restoring: set[str] = field(default_factory=set)

    def take(self, event: Event) -> None:
        before = self.update
        stage = (before.phase, before.restoring)
        if not self.phases:
            self.phases.append(stage)
        for who in before.waiting:
            self.asked.add((who, *stage))
        if isinstance(event, Done) and event.who in before.waiting:
            self.done.add((event.who, *stage))
        if isinstance(event, Failed) and event.who in before.waiting and before.restoring:
            self.failed_restoring.add(event.who)
        self.update = before.after(event)
        after = (self.update.phase, self.update.restoring)
        if after != stage:
            self.phases.append(after)

    def did(self, who: str, phases: tuple[Phase, ...], restoring: bool) -> bool:
        return all((who, phase, restoring) in self.done for phase in phases)


ALLOWED = set(NEXT.items()) | {
    *((phase, Phase.RESUME) for phase in (Phase.GATE, Phase.SETTLE, Phase.PAUSE)),
    *((phase, Phase.END) for phase in Phase),
}
KINDS = st.sampled_from(["done"] * 12 + ["failed", "died"])
NOISE = st.one_of(
    st.none(),
    st.none(),
    st.none(),
    st.builds(Done, st.sampled_from(["a", "stranger"])),
    st.builds(Died, st.sampled_from(["a", "b", "c", "d", "stranger", FLEET])),
)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sets(st.sampled_from("abcd")), st.sampled_from(MODES))
def test_any_course_ends_and_its_outcome_tells_what_every_engine_has(
    data: st.DataObject, engines: set[str], on_failure: Mode
) -> None:
    course = Course(Update.begin(engines, on_failure))
    answers = 0
    while course.update.outcome is None:
        assert course.update.waiting, "it waits for somebody until it ends"
        assert course.update.waiting <= course.update.engines | {FLEET}
        if (noise := data.draw(NOISE)) is not None:
            course.take(noise)
            if course.update.outcome is not None:
                break
        who = data.draw(st.sampled_from(sorted(course.update.waiting)))
        match data.draw(KINDS):
            case "died" if who != FLEET:
                course.take(Died(who))
            case "failed":
                course.take(Failed(who, "why"))
            case _:
                course.take(Done(who))
        answers += 1
        assert answers <= 3 + 11 * len(engines), "phases of engines: 6, and 5 to restore"
    check_course(course, engines, on_failure)


def check_course(course: Course, engines: set[str], on_failure: Mode) -> None:
    update = course.update
    for (phase, was_restoring), (following, is_restoring) in zip(
        course.phases, course.phases[1:], strict=False
    ):
        if is_restoring and not was_restoring:
            assert phase in CHANGING
            assert following in (Phase.LOAD, Phase.END)
        else:
            assert (phase, following) in ALLOWED
    assert len(set(course.phases)) == len(course.phases), "no phase comes twice"

    assert (update.phase, update.waiting) == (Phase.END, set())
    assert update.engines | update.lost | update.died == engines
    assert len(update.engines) + len(update.lost) + len(update.died) == len(engines)
    assert course.failed_restoring <= update.lost

    early = [f for f in update.failures if f.phase is not Phase.RESUME]
    match update.outcome:
        case Outcome.PUBLISHED:
            assert not early
            assert any((who, Phase.PUBLISH, False) in course.done for who in engines)
            for engine in update.engines:
                assert course.did(engine, (*CHANGING, Phase.RESUME), restoring=False)
        case Outcome.KEPT:
            assert early
            for engine in update.engines:
                unchanged = (engine, Phase.LOAD, False) not in course.asked
                back = (Phase.LOAD, Phase.CLEAR, Phase.PUBLISH)
                assert unchanged or course.did(engine, back, restoring=True)
                assert (engine, Phase.RESUME, not unchanged) in course.done
        case Outcome.FENCED:
            assert on_failure == "fence"
            assert update.failures[-1].phase in CHANGING
            assert not any(phase is Phase.RESUME for _, phase, _ in course.asked)


@given(
    st.lists(
        st.one_of(
            st.builds(Done, st.sampled_from(["a", "b", FLEET])),
            st.builds(Failed, st.sampled_from(["a", "b", FLEET]), st.just("why")),
            st.builds(Died, st.sampled_from(["a", "b", FLEET])),
        ),
        max_size=40,
    ),
    st.sampled_from(MODES),
)
def test_no_event_raises_whenever_it_comes(events: list[Event], on_failure: Mode) -> None:
    update = Update.begin("ab", on_failure)
    for event in events:
        ended_before = update if update.outcome is not None else None
        update = update.after(event)
        assert ended_before is None or update == ended_before
