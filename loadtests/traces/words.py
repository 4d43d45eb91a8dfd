"""256 common words of three letters."""

from __future__ import annotations

WORDS = tuple(
    """
    ace act add age ago aid aim air all and ant any ape apt arc are ark arm art ash ask ate bad bag ban bar
    bat bay bed bee beg bet bid big bin bit bow box boy bug bus but buy cab can cap car cat cop cow cry cup
    cut dad dam day den did die dig dim dip dog dot dry due dug ear eat egg ego end era eve eye fan far fat
    fed fee few fig fin fit fix fly fog for fox fun fur gap gas get god got gum gun gut guy gym had ham has
    hat her hid him hip his hit hop hot how hub hug ice ill ink inn ion its jam jar jaw jet job joy key kid
    kit lab lap law lay led leg let lid lie lip log lot low mad man map mat may men met mid mix mob mom mud
    nap net new nod nor not now nut oak odd off oil old one our out owe own pad pan pay pen per pet pie pig
    pin pit pop pot put ran rat raw ray red rib rid rim rip rob rod row rub rug run sad sat saw say sea see
    set she shy sin sip sit six ski sky son spy sum sun tag tan tap tax tea ten the tie tin tip toe ton too
    top tow toy try tub two use van vet via vow war was wax way web wet who why win wit yes
    """.split()
)
