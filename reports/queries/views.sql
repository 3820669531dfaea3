-- The views that queries see, over the rows of packs and what open attempts add. {rows} stands for the rows of the table,
-- other names in braces are made of the fields of records by run_query.py. A line with a colon begins a statement.

-- open_attempts:
create table folded.open_attempts (
    run_id varchar, attempt bigint, state varchar, step bigint, tokens bigint, gpu_seconds double,
    starting_seconds double, peak_flops double, peak_source varchar, {arithmetic_columns}, seen_at timestamptz,
    train_loss double, tokens_per_second double)

-- training_attempts:
select *, {peak}, {arithmetic}, {placement}, {decision}
from (
    select rows.* replace ({live_values}, greatest(rows.last_step, coalesce(live.step, 0)) as last_step)
    from ({rows}) rows left join folded.open_attempts live using (run_id, attempt))

-- runs:
select rows.* replace (
    coalesce(live.state, rows.state) as state,
    case when live.state = 'running' then greatest(rows.step, live.step) else rows.step end as step,
    greatest(rows.last_seen_at, live.seen_at) as last_seen_at,
    coalesce(live.train_loss, rows.train_loss) as train_loss,
    case when live.state = 'running' then live.tokens_per_second end as tokens_per_second,
    case when live.state = 'running' and live.tokens_per_second > 0 then
        (rows.total_steps - greatest(rows.step, live.step)) * global_batch * block_size / live.tokens_per_second
    end as seconds_left,
    rows.tokens + coalesce(live.tokens, 0) as tokens,
    rows.gpu_seconds + coalesce(live.gpu_seconds, 0) as gpu_seconds)
from ({rows}) rows left join folded.open_attempts live using (run_id)

-- evaluations:
select *, {verdict} from ({rows}) rows

-- hosts:
with nothing as ({rows}), placed as (
    select *, unnest(case when len(placement_hosts) > 0 then placement_hosts else [placement_host] end) as host
    from training_attempts)
select host, count(distinct run_id) as runs, count(*) as attempts,
    count(*) filter (failed_host = host) as failed,
    max(ended_at) filter (failed_host = host) as last_failed_at
from placed group by host

-- promotions:
select rows.* replace (runs.model_family as model_family),
    struct_pack(suite_sha256 := suite_sha256, metrics := metrics) as evaluation
from ({rows}) rows left join runs using (run_id)
