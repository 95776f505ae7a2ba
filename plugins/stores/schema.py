"""The tables of the SQLite state store.

Records are in a table of their own: listing ten thousand sessions reads none of them. Sums are kept by triggers, so
that they are right after any crash and cost nothing to ask for. Branch numbers outlive their sessions.
"""

from __future__ import annotations

import sqlite3
from dataclasses import fields

from rwkv_lightning.core.errors import StoreError
from rwkv_lightning.core.interfaces import StateInfo

APPLICATION_ID = 0x52574B56  # "RWKV", in the file's header
VERSION = 1
COLUMNS = tuple(field.name for field in fields(StateInfo))

TABLES = """
CREATE TABLE states (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL CHECK (kind IN ('session', 'prefix')),
    session TEXT NOT NULL,
    branch INTEGER NOT NULL,
    parent TEXT NOT NULL,
    model TEXT NOT NULL,
    initial TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    token_hash TEXT NOT NULL,
    last_text TEXT NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    nbytes INTEGER NOT NULL
);
CREATE INDEX states_newest ON states (kind, created DESC, key);
CREATE INDEX states_used ON states (kind, used);
CREATE INDEX states_family ON states (session, branch, key) WHERE kind = 'session';
CREATE TABLE records (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE prefix_tokens (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL);
CREATE TABLE branches (session TEXT PRIMARY KEY, next INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE totals (kind TEXT PRIMARY KEY, states INTEGER NOT NULL, nbytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO totals VALUES ('session', 0, 0), ('prefix', 0, 0)
"""
TRIGGERS = (
    """CREATE TRIGGER state_added AFTER INSERT ON states BEGIN
        UPDATE totals SET states = states + 1, nbytes = nbytes + new.nbytes WHERE kind = new.kind;
    END""",
    """CREATE TRIGGER state_replaced AFTER UPDATE OF nbytes ON states BEGIN
        UPDATE totals SET nbytes = nbytes - old.nbytes + new.nbytes WHERE kind = new.kind;
    END""",
    """CREATE TRIGGER state_deleted AFTER DELETE ON states BEGIN
        UPDATE totals SET states = states - 1, nbytes = nbytes - old.nbytes WHERE kind = old.kind;
        DELETE FROM records WHERE id = old.id;
        DELETE FROM prefix_tokens WHERE id = old.id;
    END""",
)
CHECKS = {
    "states without a record": "SELECT count(*) FROM states LEFT JOIN records USING (id) WHERE data IS NULL",
    "records without a state": "SELECT count(*) FROM records WHERE id NOT IN (SELECT id FROM states)",
    "prefixes without tokens": """SELECT count(*) FROM states LEFT JOIN prefix_tokens p USING (id)
        WHERE kind = 'prefix' AND p.tokens IS NULL""",
    "wrong sums": """SELECT count(*) FROM totals t WHERE (t.states, t.nbytes) != (
        SELECT count(*), coalesce(sum(s.nbytes), 0) FROM states s WHERE s.kind = t.kind)""",
    "branches beyond their session's number": """SELECT count(*) FROM states LEFT JOIN branches USING (session)
        WHERE branch > 0 AND (next IS NULL OR branch >= next)""",
}


def is_new(connection: sqlite3.Connection, path: str) -> bool:
    """Whether the database is empty. Changes nothing; raises StoreError when it is not one of ours, or a later one."""
    ((identity,),) = connection.execute("PRAGMA application_id").fetchall()
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    ((objects,),) = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    if not objects and not identity and not version:
        return True
    if identity != APPLICATION_ID:
        raise StoreError(
            f"'{path}' is an SQLite database of another program: give another file with --state-db", "other"
        )
    if version != VERSION:
        raise StoreError(
            f"the state database '{path}' has format {version} and this server knows {VERSION}: "
            "serve it with the version that wrote it, or give another file with --state-db",
            "version",
        )
    return False


def create(connection: sqlite3.Connection) -> None:
    """Make the tables, within the caller's transaction."""
    for statement in (*TABLES.split(";\n"), *TRIGGERS):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def problems(connection: sqlite3.Connection) -> list[str]:
    """SQLite's own integrity check, then that the tables agree; empty when all is well."""
    found = [str(line) for (line,) in connection.execute("PRAGMA integrity_check").fetchall() if line != "ok"]
    for what, query in CHECKS.items():
        ((count,),) = connection.execute(query).fetchall()
        if count:
            found.append(f"{what}: {count}")
    return found
