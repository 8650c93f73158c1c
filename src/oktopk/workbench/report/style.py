"""How the page looks: its own colours for light, dark and paper; pictures take theirs from here."""

from __future__ import annotations

_LIGHT = (
    "--surface:#ffffff;--ink:#1a1a1a;--faint:#595959;--grid:#e3e3e3;--note:#fff4d6;"
    "--blue:#0072b2;--vermilion:#d55e00;--green:#009e73;--purple:#cc79a7;--orange:#e69f00;--sky:#56b4e9;"
)
_DARK = (
    "--surface:#14171a;--ink:#e8e8e8;--faint:#a8adb2;--grid:#363b40;--note:#3a3115;"
    "--blue:#3a97dc;--vermilion:#ee7733;--green:#1fb98c;--purple:#d98fb8;--orange:#e69f00;--sky:#8ecff5;"
)
STYLE = f"""
:root{{color-scheme:light dark;--font:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;{_LIGHT}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--surface);color:var(--ink);font:1rem/1.5 var(--font);overflow-wrap:anywhere}}
main{{max-width:70rem;margin:0 auto;padding:1rem}}
h1{{font-size:1.5rem;line-height:1.25}}
h2{{font-size:1.3rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--grid)}}
h3{{font-size:1.05rem;margin:1.5rem 0 .5rem}}
.ending{{background:var(--note);padding:.6rem .8rem;border-left:4px solid var(--orange);font-weight:600}}
.remarks,.absent{{color:var(--faint);padding-left:1.2rem}}
.facts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,9.5rem),1fr));gap:.6rem 1rem;margin:1rem 0}}
.facts dt{{color:var(--faint);font-size:.85rem}}
.facts dd{{margin:0}}
.tables{{display:flex;flex-wrap:wrap;gap:1rem 2.5rem;align-items:flex-start}}
.scroll{{overflow-x:auto;max-width:100%}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.92rem;overflow-wrap:normal}}
th,td{{padding:.2rem .9rem .2rem 0;border-bottom:1px solid var(--grid);text-align:left}}
th{{font-weight:400}}
tbody th{{position:sticky;left:0;background:var(--surface);min-width:8rem}}
thead th{{color:var(--faint);vertical-align:bottom}}
thead th+th{{text-align:right;padding:.2rem .2rem .2rem .9rem}}
td.number{{text-align:right;white-space:nowrap;padding-right:.2rem;padding-left:.9rem}}
tbody tr:hover{{background:var(--grid)}}
.gallery{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr));gap:1.5rem 2rem}}
.gallery{{margin-top:1rem}}
figure{{margin:0;break-inside:avoid}}
figure svg{{display:block;width:100%;max-width:100%;height:auto}}
figure svg *{{stroke-linejoin:round;stroke-linecap:butt}}
figcaption{{color:var(--faint);font-size:.92rem;margin-top:.3rem}}
details{{margin-top:1.5rem}}
summary{{cursor:pointer}}
@media print{{
:root{{font-size:9.5pt}}
main{{max-width:none;padding:0}}
section{{break-before:auto}}
h2,h3{{break-after:avoid}}
tr{{break-inside:avoid}}
.gallery{{display:block;columns:2;column-gap:1.5rem}}
figure{{margin-bottom:1rem}}
details:not([open]){{display:none}}
.scroll{{overflow:visible}}
}}
"""
