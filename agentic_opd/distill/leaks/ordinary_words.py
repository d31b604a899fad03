"""Ordinary words of advice on code."""

ORDINARY = frozenset(
    """
    a able about above abs add added after again all alone already also always an and any append are array as ask at
    be because been before begin best better between big bit blank body bool boolean both bracket break but by call
    called can capital case cases change char character characters check class close code column comma compare convert
    correct count counts data day date default delete dict different digit digits do does done down each edge element
    else empty end entry equal error even every example exercise expected extra fail false fast field file find first
    fit fix flag float for found from function get give given go good got greater group groups half has hash have head
    help here high hint hold i if ignore in index inner input insert int integer is it it's item its join just keep key
    keys kind large largest last least leave left len length less letter letters level like line lines list lists long
    loop lot low lower made make many map match math max may mean min minus missing mode more most move much must name
    names need negative nested never new next no node none not nothing null number numbers object of off old on once one
    only open or order other out output over own pair pairs part parts pass path plus point pop positive prefix print
    problem program programming push put python random range read real remove repeat replace rest result return reverse
    reversed right root round row rows rule run same score see seen self sentence sequence set shift short should side
    simple single size skip slice small smaller so solution some sort sorted source space spaces split stack start state
    step steps still stop store str string strings style sub such suffix sum swap symbol take target task test tests
    text than that the their them then there these they thing this those three time times to today together token too
    top total tree true try tuple two type under up upper use used user valid value values wait was way we well were
    what when where which while white whole will with without word words work write wrong year yes yet you your zero ...
    """.split()  # noqa: SIM905
)
"""Words that count as strings of the tests only in quotes or after words like "such as"."""
