"""Offers a checkpoint to an alias in the name of a person."""

import getpass
import os
import socket

from reports.queries.run_lookup import FoundCheckpoint, configuration_of
from storage.logs.registry import Registry, RegistryState, SuiteReference
from tasks.checkpoints.promotion import Approval, Candidate, PromotionRules, evaluations_of
from tasks.checkpoints.promotion_offer import offer
from tasks.configuration.run_configuration import RunConfig
from tasks.evaluator.evaluation_suite import required_suites_of


def this_person() -> str:
    """Return user and host, for the record."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container's user may have no name
        return f"uid {os.getuid()}@{socket.gethostname()}"


def promotion_rules(config: RunConfig) -> PromotionRules:
    """Return the gates that the configuration asks for."""
    required = required_suites_of(config.evaluation)
    return PromotionRules(
        required=tuple(SuiteReference(name=suite.name, sha256=suite.sha256) for suite in required),
        min_improvement=config.promotion.min_improvement,
        refuse_verdicts=config.promotion.refuse_verdicts,
        needs_approval=config.promotion.require_approval,
    )


def offer_as_person(found: FoundCheckpoint, alias: str, *, why: str = "") -> RegistryState:
    """Record the gates' decision with the person's name, who so approves it, and reason; raises `GateRefused`."""
    state, person = found.log.state, this_person()
    candidate = Candidate(
        run_id=found.log.run_id,
        reference=found.reference,
        evaluations=evaluations_of(state, found.reference.manifest_sha256),
        by=person,
        why=why,
        approval=Approval(is_given=True, by=person, why=why),
    )
    return offer(found.log, Registry(found.log.store, alias), candidate, promotion_rules(configuration_of(state)))
