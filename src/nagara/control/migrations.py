"""The steps from an empty state database to the present one. Data only.

Step N brings a database from version N-1 to N; a published step never changes.
"""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE versions (
            tenant TEXT NOT NULL, app TEXT NOT NULL, version INTEGER NOT NULL,
            definition TEXT NOT NULL, document TEXT NOT NULL, deployed_s REAL NOT NULL,
            PRIMARY KEY (tenant, app, version))""",
        """CREATE TABLE apps (
            tenant TEXT NOT NULL, app TEXT NOT NULL, version INTEGER NOT NULL,
            PRIMARY KEY (tenant, app))""",
        """CREATE TABLE replicas (
            replica TEXT PRIMARY KEY, tenant TEXT NOT NULL, app TEXT NOT NULL,
            definition TEXT NOT NULL, purpose TEXT NOT NULL, slot TEXT NOT NULL,
            epoch INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT,
            created_s REAL NOT NULL, changed_s REAL NOT NULL)""",
        "CREATE INDEX replicas_by_app ON replicas (tenant, app, created_s)",
        """CREATE TABLE starts (
            replica TEXT PRIMARY KEY, tenant TEXT NOT NULL, app TEXT NOT NULL,
            kind TEXT, stages TEXT NOT NULL, total_s REAL NOT NULL, fallback TEXT,
            snapshot TEXT, error TEXT, started_s REAL NOT NULL)""",
        "CREATE INDEX starts_by_app ON starts (tenant, app, started_s)",
        """CREATE TABLE captures (
            replica TEXT PRIMARY KEY, tenant TEXT NOT NULL, app TEXT NOT NULL,
            definition TEXT NOT NULL, version INTEGER NOT NULL, snapshot TEXT, reason TEXT,
            memory_bytes INTEGER NOT NULL, layer_bytes INTEGER NOT NULL,
            elapsed_s REAL NOT NULL, finished_s REAL NOT NULL)""",
        """CREATE TABLE keys (
            id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL,
            sha256 TEXT NOT NULL UNIQUE, created_s REAL NOT NULL)""",
    ),
    ("ALTER TABLE starts ADD COLUMN files TEXT",),
    (
        """CREATE TABLE pool_machines (
            name TEXT PRIMARY KEY, offering TEXT NOT NULL, state TEXT NOT NULL,
            epoch INTEGER NOT NULL, reason TEXT NOT NULL, address TEXT NOT NULL,
            after_drain TEXT)""",
        """CREATE TABLE pool_leases (
            slot TEXT PRIMARY KEY, machine TEXT NOT NULL, epoch INTEGER NOT NULL, app TEXT,
            needs TEXT NOT NULL, wanted TEXT NOT NULL)""",
        "CREATE INDEX pool_leases_by_machine ON pool_leases (machine)",
        "CREATE TABLE pool_facts (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    ),
    (
        "ALTER TABLE pool_machines ADD COLUMN diagnosis TEXT NOT NULL DEFAULT 'medium'",
        "ALTER TABLE pool_machines ADD COLUMN kept_out TEXT NOT NULL DEFAULT '[]'",
    ),
    ("ALTER TABLE starts ADD COLUMN host TEXT",),
    (
        """CREATE TABLE jobs (
            id TEXT PRIMARY KEY, app TEXT NOT NULL, owner TEXT NOT NULL, state TEXT NOT NULL,
            method TEXT NOT NULL, path TEXT NOT NULL, headers TEXT NOT NULL, body BLOB NOT NULL,
            created_s REAL NOT NULL, status INTEGER, answer_headers TEXT, answer BLOB,
            reason TEXT, ended_s REAL)""",
        "CREATE INDEX jobs_by_state ON jobs (state)",
    ),
    ("ALTER TABLE keys ADD COLUMN limits TEXT NOT NULL DEFAULT '{}'",),
    ("ALTER TABLE starts ADD COLUMN failed_snapshot TEXT",),
    (
        "ALTER TABLE jobs ADD COLUMN callback TEXT",
        "ALTER TABLE jobs ADD COLUMN callback_state TEXT",
        "CREATE TABLE tenant_limits (tenant TEXT PRIMARY KEY, limits TEXT NOT NULL)",
    ),
    (
        """CREATE TABLE control_epochs (
            id INTEGER PRIMARY KEY, database TEXT NOT NULL, number INTEGER NOT NULL)""",
    ),
)
