"""How a report in HTML looks: one style sheet, light and dark, for screens and for paper.

Owns it. The colours of reasons are those of the picture (Okabe and Ito, 2008), which everybody tells apart.
"""

STYLE = """
:root{--ink:#1d2127;--soft:#5b6470;--line:#e1e5ea;--ground:#ffffff;--panel:#f6f8fa;--link:#0057a3;
--completed:#2a78b8;--preempted:#56b4e9;--lost:#e69f00;--oom:#cc79a7;--bad:#009e73;--other:#8a929c}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ed;--soft:#9aa4b0;--line:#30363d;--ground:#0f1319;--panel:#171c23;
--link:#6cb6ff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1.5rem 4rem;max-width:78rem;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
h1{font-size:1.65rem;line-height:1.25;margin:0 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.12rem;margin:2.4rem 0 .7rem;padding-bottom:.3rem;border-bottom:1px solid var(--line)}
p{margin:.5rem 0;max-width:62rem;overflow-wrap:anywhere}
a{color:var(--link);text-decoration:none}a:hover,a:focus{text-decoration:underline}
nav ul,ul.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem 1rem;margin:.4rem 0;padding:0;font-size:.87rem}
ul.legend{gap:.35rem .6rem;margin:.35rem 0 0}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(19rem,1fr));gap:.55rem .8rem;margin:.6rem 0}
dl div{background:var(--panel);border:1px solid var(--line);border-radius:.45rem;padding:.5rem .75rem}
dt{color:var(--soft);font-size:.8rem}dd{margin:.1rem 0 0;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:.6rem 0;border:1px solid var(--line);border-radius:.45rem}
table{border-collapse:collapse;min-width:55%;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.35rem .65rem;border-top:1px solid var(--line)}
th{border-top:0;background:var(--panel);color:var(--soft);font-weight:600;white-space:nowrap}
td{white-space:nowrap}td:last-child{white-space:normal;overflow-wrap:anywhere}
td:last-child:nth-child(n+7){min-width:15rem}td.n,th.n{text-align:right}
pre{background:var(--panel);border:1px solid var(--line);border-radius:.45rem;padding:.7rem .9rem;margin:.6rem 0;
overflow-x:auto;font:.83rem/1.5 ui-monospace,"Liberation Mono",Menlo,monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
code{font:.9em ui-monospace,"Liberation Mono",Menlo,monospace;
background:var(--panel);padding:.08em .3em;border-radius:.25em}
dd code{background:none;padding:0}
figure{margin:.6rem 0}figure img{display:block;width:100%;height:auto;background:#fff;border:1px solid var(--line);
border-radius:.45rem}
figcaption{color:var(--soft);font-size:.85rem;margin-top:.4rem}
details{margin:.4rem 0}summary{cursor:pointer;padding:.2rem 0}
svg.timeline{display:block;width:100%;height:auto}svg.timeline text{font-size:12px;fill:var(--soft)}
.ground{fill:var(--panel)}svg rect{stroke:var(--ground);stroke-width:.6}
.chip{display:inline-block;padding:0 .5em 0 .45em;border-left:.7em solid var(--other);background:var(--panel);
border-radius:.2em;white-space:nowrap}
.r-completed{fill:var(--completed);border-color:var(--completed)}.r-preempted{fill:var(--preempted);border-color:var(--preempted)}
.r-lost{fill:var(--lost);border-color:var(--lost)}.r-oom,.r-hung{fill:var(--oom);border-color:var(--oom)}
.r-bad-data,.r-storage{fill:var(--bad);border-color:var(--bad)}
.r-error,.r-diverged{fill:var(--ink);border-color:var(--ink)}
.r-cancelled,.r-fenced,.r-other{fill:var(--other);border-color:var(--other)}
.r-open{fill:var(--soft);border-color:var(--soft)}
@media print{body{max-width:none;padding:0}nav{display:none}section{break-inside:avoid-page}.wide{overflow:visible}}
"""
