"""Money in exact numbers: largest remainders, minor units, texts. Nothing here is a float.

A charge is a Fraction until the bill is written. It is rounded once, over all lines together: the
bill's sum half to even, and each line up or down so that the lines have that very sum.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

# ISO 4217 as of 2026: the codes that there are, by how many digits their minor unit has.
_CODES: Final[Mapping[int, str]] = {
    0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
    2: "AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BMD BND BOB BRL BSD BTN BWP BYN BZD CAD CDF"
    " CHF CNY COP CRC CUP CVE CZK DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GTQ GYD"
    " HKD HNL HTG HUF IDR ILS INR IRR JMD KES KGS KHR KPW KYD KZT LAK LBP LKR LRD LSL MAD MDL MGA"
    " MKD MMK MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD PAB PEN PGK PHP PKR PLN"
    " QAR RON RSD RUB SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC SYP SZL THB TJS TMT TOP"
    " TRY TTD TWD TZS UAH USD UYU UZS VED VES WST XCD XCG YER ZAR ZMW ZWG",
    3: "BHD IQD JOD KWD LYD OMR TND",
    4: "CLF UYW",
}
_DIGITS: Final = {code: digits for digits, codes in _CODES.items() for code in codes.split()}
CURRENCIES: Final = frozenset(_DIGITS)


def minor_digits(currency: str) -> int:
    """Return how many decimal digits the amounts of a currency have, by ISO 4217."""
    return _DIGITS[currency]


def quantize_together(amounts: Sequence[Fraction], *, digits: int) -> list[Decimal]:
    """Return the amounts with so many digits, such that their sum is the rounded sum.

    The sum is rounded half to even. Of amounts that lost equally much the first is rounded up: the
    caller puts them into an order that does not depend on how they were found.
    """
    scale = 10**digits
    scaled = [amount * scale for amount in amounts]
    floors = [amount.numerator // amount.denominator for amount in scaled]
    left = round(sum(scaled, Fraction(0))) - sum(floors)
    # Never more than there are amounts: each lost less than a unit by rounding down.
    by_loss = sorted(range(len(scaled)), key=lambda at: (floors[at] - scaled[at], at))
    for at in by_loss[:left]:
        floors[at] += 1
    return [Decimal(floor).scaleb(-digits) for floor in floors]


def quantize_to(total: Decimal, amounts: Sequence[Fraction], *, digits: int) -> list[Decimal]:
    """Return the amounts with so many digits, such that their sum is a total.

    That is their own, rounded up or down. Each is rounded up or down too, and an amount of nothing
    stays one; whatever a total is off by beyond that goes to the first amount.
    """
    scale = 10**digits
    scaled = [amount * scale for amount in amounts]
    floors = [amount.numerator // amount.denominator for amount in scaled]
    left = int(total * scale) - sum(floors)
    lossy = [at for at, amount in enumerate(scaled) if amount != floors[at]]
    lossy.sort(key=lambda at: (floors[at] - scaled[at], at))
    raised = lossy[: max(0, left)]
    for at in raised:
        floors[at] += 1
    floors[0] += left - len(raised)
    return [Decimal(floor).scaleb(-digits) for floor in floors]


def rounded(amount: Fraction, *, digits: int) -> Decimal:
    """Return one amount with so many digits, half to even."""
    return quantize_together([amount], digits=digits)[0]


def money_text(amount: Fraction | Decimal, currency: str) -> str:
    """Return an amount for people: `1,234.50`, with the digits of its currency."""
    return f"{rounded(Fraction(amount), digits=minor_digits(currency)):,f}"


def fraction_of(number: Decimal | int | str) -> Fraction:
    """Return the exact value of a decimal number."""
    return Fraction(number)


def text_of(amount: Any, *, digits: int = 12) -> str:  # noqa: ANN401  # Fraction or Decimal
    """Return an amount as a plain decimal text, without an exponent.

    A Fraction that has no end in decimals is rounded half to even at so many digits.
    """
    if isinstance(amount, Decimal):
        return f"{amount:f}"
    text = f"{rounded(amount, digits=digits):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
