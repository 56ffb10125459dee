"""The colours of the sample scenes, and the one index that tells a sidewalk's colour from every other.

The index is ``G + B - NIR_WEIGHT * NIR``. It is ``+CONTRAST`` on sidewalks and ``-CONTRAST`` on everything beside them
(8-bit values), so a pixel that is half sidewalk has the index 0 whatever the other half is, and shade, which multiplies
all bands alike, changes its size but not its sign. A model needs nothing but one weight a band.
"""

NIR_WEIGHT = 2.5
CONTRAST = 176.0

Colour = tuple[int, int, int, int]


def colour(red: int, green: int, blue: int) -> Colour:
    """Returns (R, G, B, NIR) of anything but a sidewalk."""
    return red, green, blue, min(255, round((green + blue + CONTRAST) / NIR_WEIGHT))


def sidewalk_colour(red: int, green: int, blue: int) -> Colour:
    """Returns (R, G, B, NIR) of a sidewalk."""
    return red, green, blue, round((green + blue - CONTRAST) / NIR_WEIGHT)


SIDEWALK = sidewalk_colour(208, 203, 194)

GRASS = colour(96, 120, 76)
DRY_GRASS = colour(148, 146, 100)
SOIL = colour(164, 142, 112)

ASPHALT = colour(108, 108, 110)
OLD_ASPHALT = colour(130, 129, 126)
GRAVEL = colour(176, 166, 146)
PAINT = colour(206, 196, 150)

ROOFS = (
    colour(112, 96, 84),
    colour(84, 84, 88),
    colour(150, 96, 78),
    colour(150, 148, 146),
    colour(186, 170, 146),
    colour(226, 224, 218),
    colour(94, 106, 118),
)
CROWNS = (colour(58, 82, 52), colour(70, 92, 54), colour(84, 100, 62))
CARS = (
    colour(222, 222, 220),
    colour(52, 54, 58),
    colour(150, 40, 40),
    colour(60, 80, 120),
    colour(160, 162, 164),
)

GROUND = (GRASS, DRY_GRASS, SOIL)
BACKGROUND = (*GROUND, ASPHALT, OLD_ASPHALT, GRAVEL, PAINT, *ROOFS, *CROWNS, *CARS)
