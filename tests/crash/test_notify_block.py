"""A notification block of a real Prefect server is told as the other receivers are."""

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.flows.orchestrator.run_notices import all_receivers
from cairn.reports.notices.notice import silent_notice
from cairn.tasks.configuration.settings import NotifyConfig
from tests.reports.webhook import Hook, serving_hook

pytestmark = pytest.mark.slow


def test_a_block_of_the_server_passes_the_words_on(api_url: str) -> None:
    with serving_hook() as hook, temporary_settings({PREFECT_API_URL: api_url}):
        save_block("told-by-cairn", hook)
        (receiver,) = all_receivers(NotifyConfig(block="custom-webhook/told-by-cairn"))
        receiver.receive(silent_notice("bard", "", 1, 2, 90.0))
    assert hook.posted == [{"subject": "cairn: bard: silent", "body": silent_notice("bard", "", 1, 2, 90.0).text}]


def save_block(name: str, hook: Hook) -> None:
    words = {"subject": "{{subject}}", "body": "{{body}}"}
    CustomWebhookNotificationBlock(name=name, url=hook.url, json_data=words).save(name, overwrite=True)
