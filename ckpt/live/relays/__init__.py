"""Sinks that pass on what they take: a tree of receivers below one source.

    source ──┬──► sink 1 ──┬──► sink 3        each sink takes about equal parts from the source and from the sinks that began before
             │             └──► sink 4        it; so with n sinks the source sends 1 + 1/2 + 1/3 + … of a state, not n
             └──► sink 2 ──┴──► …

A sink passes pieces on as soon as it has verified them, while others still come. Nobody waits in a circle: a sink takes from those alone
that had begun when it did. The digests of what a relay gives come from the source, and the receiver compares.
"""
