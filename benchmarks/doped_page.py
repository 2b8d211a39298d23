"""x"""


def page(d, a):
    return "# Doped\n"


def draw(*a):
    pass
